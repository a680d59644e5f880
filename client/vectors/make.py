"""Writes pacer.json, the test vectors that the pacers in Python and in JavaScript both pass.

    python client/vectors/make.py

QoE and reading mode come from the definition in `sluice_client.qoe`, not from the machines under test; the cuts of text
and smooth mode are those of the Python pacer, whose properties have tests of their own. Seeds fix everything.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sluice_client.pacer_base import cut_piece
from sluice_client.qoe import QoeTarget, delay_sum, displayed_times, final_qoe, qoe_at
from sluice_client.segment import Segmenter
from sluice_client.smooth_pacer import SmoothPacer, SmoothPacing

OUTPUT = Path(__file__).with_name("pacer.json")

TEXTS = {
    "english": "Rivers carry what the hills let go: sand, seeds, and the cold of the snow. Boats go down with them, "
    "slowly, and their lamps are lit before the evening.\n\nNobody hurries - why should they?",
    "chinese": "河水带走山放下的东西：沙、种子，和雪的寒冷。船跟着它慢慢下去，（灯）在傍晚之前点亮。abc混合文字123。",
    "japanese": "川は山の手放したものを運ぶ。「砂」と種と、雪の冷たさ。ゆっくりとサーバーが、か\u3099くる。",
    "korean": "강은 산이 놓아준 것을 나른다. 모래와 씨앗, 그리고 눈의 추위.",
    "marks": "Cafe\u0301 nai\u0308ve 👩\u200d👩\u200d👧 family 👍🏽 ok, "
    "देवनागरी लिपि और ไทยไม่มีช่องว่างระหว่างคำเลยสักนิดเดียว end",
    "long_word": "see https://example.org/a/very/long/path/that/never/ends/and/goes/on?with=query&and=more for it",
    "code": "Here it is:\n\n```python\ndef f(x):\n    return x + 1\n```\n\nThat was `f` and ``` no fence `` here.\n"
    "1. item\n    ~~~~sh\n    ls ~~~\n    ~~~~\nafter the list, prose again.",
    "open_fence": "Start\n```\nnever closed\n\nstill code",
    "json": ' {"answer": [1, 2, 3], "words": "none of this is read aloud"}',
    "json_array": '[ {"a": 1}, {"b": "two words"} ]',
    "link": "[a link](https://example.org) is not JSON and is paced as prose is",
    "blanks": "  \n\n leading blanks,   wide  gaps\u3000and\u00a0others \t end \n",
}


def cut_text(text: str, rng: random.Random, longest: int = 6) -> list[str]:
    """Pieces of 1 to 6 characters, as a tokenizer might make them, or longer ones, as a server that is behind does."""
    pieces = []
    while text:
        size = rng.randint(1, longest)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def arrival_times(kind: str, count: int, rng: random.Random) -> list[float]:
    """Instants of `count` pieces, in seconds; microsecond grid."""
    now_s = rng.uniform(0.05, 3.0)
    times = []
    for i in range(count):
        times.append(round(now_s, 6))
        now_s += {
            "fast": 0.012,
            "reading": 1 / 4.8,
            "slow": 0.6,
            "random": rng.expovariate(8.0),
            "bursts": 0.5 if i % 10 == 9 else 0.0,
            "at_once": 0.0,
            "pauses": 0.03 + (rng.uniform(0.2, 4.0) if i % 17 == 16 else 0.0),
        }[kind]
    return times


ARRIVALS = ("fast", "reading", "slow", "random", "bursts", "at_once", "pauses")


def qoe_case(seed: int) -> dict[str, Any]:
    """One delivery timeline with its final QoE, and its QoE at some instants."""
    rng = random.Random(seed)  # noqa: S311  a test vector, not a secret
    target = QoeTarget(round(rng.uniform(0.2, 3.0), 3), round(rng.uniform(0.5, 30.0), 3))
    kind = ARRIVALS[seed % len(ARRIVALS)]
    delivered = arrival_times(kind, (1, 2, 3, 20, 60)[seed % 5], rng)
    instants = sorted(delivered[-1] + round(rng.uniform(0.0, 20.0), 6) for _ in range(4))
    return {
        "name": f"qoe-{seed}-{kind}",
        "target": asdict(target),
        "delivered_s": delivered,
        "displayed_s": displayed_times(target, delivered),
        "delay_s": delay_sum(target, delivered),
        "final": final_qoe(target, delivered),
        "at": [
            {"t_s": t, "finished": finished, "qoe": qoe_at(target, delivered, t, finished=finished)}
            for t in instants
            for finished in (False, True)
        ],
    }


def thinking_case(seed: int) -> dict[str, Any]:
    """Thinking, then text: by the definition the text is all, expected a reading gap behind the thinking."""
    rng = random.Random(4000 + seed)  # noqa: S311
    target = QoeTarget(round(rng.uniform(0.2, 3.0), 3), round(rng.uniform(0.5, 30.0), 3))
    times = arrival_times(ARRIVALS[seed % len(ARRIVALS)], 24, rng)
    count = (1, 5, 23, 24)[seed % 4]
    thought_s, delivered = times[count - 1], times[count:]
    behind = QoeTarget(max(target.ttft_s, thought_s + 1 / target.speed_tokens_per_s), target.speed_tokens_per_s)
    return {
        "name": f"thinking-{seed}",
        "target": asdict(target),
        "thought_s": times[:count],
        "delivered_s": delivered,
        "displayed_s": displayed_times(behind, delivered),
        "final": final_qoe(behind, delivered) if delivered else 1.0,
        "at": [
            {"t_s": t, "qoe": qoe_at(behind, delivered, t, finished=False)}
            for t in (times[-1] + round(rng.uniform(0.0, 9.0), 6) for _ in range(2))
        ],
    }


def reading_case(seed: int) -> dict[str, Any]:
    """Pieces of one or more tokens; each word is shown when the last token of it is displayed by the definition."""
    rng = random.Random(1000 + seed)  # noqa: S311
    target = QoeTarget(round(rng.uniform(0.2, 2.0), 3), round(rng.uniform(2.0, 12.0), 3))
    kind = ARRIVALS[seed % len(ARRIVALS)]
    texts = cut_text(TEXTS["chinese" if seed % 5 == 4 else "english"], rng, longest=24 if seed % 2 else 6)[:40]
    times = arrival_times(kind, len(texts), rng)
    counts = [rng.choice((1, 1, 1, 2, 3, 7)) for _ in texts]
    delivered = [t for t, count in zip(times, counts, strict=True) for _ in range(count)]
    displayed = displayed_times(target, delivered)
    lags = [d - (target.ttft_s + i / target.speed_tokens_per_s) for i, d in enumerate(displayed)]
    shown, last = [], -1
    for text, count in zip(texts, counts, strict=True):
        for part, part_count in cut_piece(text, count):
            last += part_count
            shown.append([part, displayed[last]])
    return {
        "name": f"reading-{seed}-{kind}",
        "mode": "reading",
        "target": asdict(target),
        "events": [["push", *event] for event in zip(times, texts, counts, strict=True)] + [["finish", times[-1]]],
        "shown": shown,
        "qoe": final_qoe(target, delivered),
        "stall_seconds": lags[-1] - lags[0],
    }


def smooth_case(seed: int, name: str, kind: str) -> dict[str, Any]:
    """One text through the smooth pacer, with a skip in every fifth case and unpaced pieces in every seventh."""
    rng = random.Random(2000 + seed)  # noqa: S311
    target = QoeTarget(1.0, rng.choice((4.8, 4.8, 3.3, 10.0)))
    texts = cut_text(TEXTS[name], rng)
    times = arrival_times(kind, len(texts), rng)
    events: list[list[Any]] = []
    for i, (now_s, text) in enumerate(zip(times, texts, strict=True)):
        count = 0 if rng.random() < 0.05 else rng.choice((1, 1, 1, 2))
        events.append(["push", now_s, text, count, not (seed % 7 == 6 and i % 5 == 4)])
        if seed % 5 == 4 and i == len(texts) * 2 // 3:
            events.append(["skip", round(now_s + 0.01 * (kind != "at_once"), 6)])
    late_s = rng.choice((0.0, 0.05, 2.0))
    events.append(["finish", round(times[-1] + late_s + 0.02, 6)])
    pacer = SmoothPacer(target, SmoothPacing())
    replay(pacer, events)
    shown = pacer.pop(float("inf"))
    stats = pacer.stats()
    return {
        "name": f"smooth-{seed}-{name}-{kind}",
        "mode": "smooth",
        "target": asdict(target),
        "events": events,
        "shown": [[item.text, item.at_s] for item in shown],
        "qoe": stats.qoe,
        "stall_seconds": stats.stall_seconds,
    }


def replay(pacer: Any, events: list[list[Any]]) -> None:
    """Apply the events of a case to a pacer."""
    for event in events:
        if event[0] == "push":
            pacer.push(event[1], event[2], event[3], paced=event[4] if len(event) > 4 else True)
        else:
            getattr(pacer, event[0])(event[1])


def segment_case(seed: int, name: str) -> dict[str, Any]:
    """How one text is cut: [text, starts a unit, paced] of each piece's fragments."""
    pieces = cut_text(TEXTS[name], random.Random(3000 + seed))  # noqa: S311
    segmenter = Segmenter()
    return {"name": name, "pieces": pieces, "fragments": [[list(f) for f in segmenter.feed(piece)] for piece in pieces]}


def build() -> dict[str, Any]:
    """Every vector."""
    smooth = [(name, kind) for i, name in enumerate(TEXTS) for kind in (ARRIVALS[i % 7], ARRIVALS[(i + 3) % 7])]
    smooth += [("english", kind) for kind in ARRIVALS]
    return {
        "about": "Made by make.py. Times in seconds since the request's arrival; compare numbers within tolerance.",
        "tolerance": 1e-9,
        "qoe": [qoe_case(seed) for seed in range(35)],
        "thinking": [thinking_case(seed) for seed in range(14)],
        "pacer": [reading_case(seed) for seed in range(14)]
        + [smooth_case(seed, name, kind) for seed, (name, kind) in enumerate(smooth)],
        "segments": [segment_case(seed, name) for seed, name in enumerate(TEXTS)],
    }


def main() -> None:
    """Write the file, one case per line."""
    lines = []
    for key, value in build().items():
        cases = isinstance(value, list)
        body = "[\n" + ",\n".join(json.dumps(case, ensure_ascii=True) for case in value) + "\n]" if cases else None
        lines.append(f"{json.dumps(key)}: {body or json.dumps(value)}")
    OUTPUT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="ascii")


if __name__ == "__main__":
    main()
