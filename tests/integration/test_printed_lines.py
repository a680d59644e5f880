"""Every line that documents, help texts and hints tell people to type is typed here, or is in a list that says why not.

`tests.support.printed_lines` collects them, so that a new one that is in no list fails.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click
import pytest

from cli.main import cli
from tests.support.group_changes import group_env
from tests.support.pasting import ROOT, Place, printed_table
from tests.support.printed_lines import Line, collect
from tests.support.processes import wait_until
from tests.support.seeds import first_of
from tests.support.waiting import rounds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LINES: Final = collect()

NOT_TYPED: Final = (
    (r"docs/results/.*: .*", "hours, another machine, or traces that do not ship"),
    (r".*: make .*", "installs, or runs the tests, or measures"),
    (
        r".*: (SLUICE_\S+ )*docker[- ]compose.*|.*: nats-server --signal reload",
        "a container engine: tests/compose; a pid file",
    ),
    (r"docs/operations\.md: sudo .*", "root, and systemd: tests/integration/test_systemd_unit.py"),
    (r"docs/gpu.md: .*", "needs a GPU, or a machine without a network"),
    (
        r"docs/design/(tools|simulation|dispatcher|elastic-memory|groups|packing)\.md: python -m .*",
        "for developers, minutes",
    ),
    (r"docs/decisions/.*: python -m (benchmarks|shared)\..*", "for developers, minutes"),
    (r"client/README\.md: (js|python vectors|pytest|node|npm).*", "tests of the client run these"),
    (r"docs/recipes\.md: .*", "other people's libraries: tests/recipes"),
    (r".*: pip install .*", "the network"),
    (r".*: (ulimit|kill -CONT|kill -INT).*", "a word of the shell, not to be typed alone"),
    (r".*: nats (kv get|kv ls|kv watch|sub|micro|sub --translate)", "the name of a command"),
    (
        r".*: sluice (pull --to|nats-setup --cluster|up --log-dir|up --system|up --model|compare --trace)",
        "the name of an option",
    ),
    (r".*: python -m services\.(<name>.*|worker|dispatcher|monitor|planner)", "the name of a program"),
    (r".*: python -m services\.worker --executor modelled --profile .*", "tests/integration: a modelled worker"),
    (r".*: python -m shared\.process\.health FILE", "tests/unit/shared/test_shared_health.py"),
    (r"docs/design/reliability\.md: sluice chaos kill\|hang\|restart TARGET", "a pattern of three commands"),
    (r".*: sluice (up|demo|pull|replay|profile|keys create|chaos|nats-config)", "the name of a command"),
    (r".*: sluice (simulate|compare|plan|restore|bench|nats-setup|keys|completion)", "the name of a command"),
    (r".*: nats kv get sluice_default_plan filling --raw", "another system: tests/faults/test_packing.py"),
    (r".*: (.*\| )?sluice (down|up -d|logs|run).*", "ends the place, or stays: tests/integration/test_cli_runs.py"),
    (r".*sluice demo --burst", "a minute: tests/integration/test_cli_talk.py"),
    (r".*: sluice keys (list|revoke).*", "a file with keys: tests/unit/cli/test_cli_keys.py"),
    (r".*: sluice drain.*", "ends workers, of which the place has two: tests/faults/test_drain.py"),
    (r".*: sluice nats-setup --keep", "stays; tests/integration/test_cli_nats_setup.py"),
    (r"docs/operations\.md: (nats-server -c keys|export |sign_in).*", "three hosts: tests/faults/test_nats_cluster.py"),
    (
        r"sluice (nats-config|nats-setup) --help: SLUICE_.*|.*: nats-server -c \./nats.*",
        "see test_a_broker_of_ones_own",
    ),
    (r"docs/operations\.md: SLUICE_NATS_USER=setup .*", "see test_a_broker_of_ones_own"),
    (
        r".*: (sluice up|sluice pull|.*)owner/name.*",
        "the network; tests/integration/test_cli_pull.py",
    ),
    (r"sluice up --help: NATS_URL=nats://broker:4222 sluice up", "a broker that runs elsewhere"),
    (r".*: sluice profile --.*", "two minutes; tests/integration/test_cli_measure.py"),
    (r".*: sluice (simulate|compare) .*--traces DIR.*", "traces that do not ship"),
)
"""Place and line, by a pattern, and why nobody types it here; names and options in it are looked at all the same."""

PUT_IN: Final = (
    (r"^\.venv/bin/", ""),
    (r"/path/to/llama-checkpoint|\./llama\b", "llama"),
    (r"http://(127\.0\.0\.1|host):8000|(?<=curl )…", "$URL"),
    (r" --nats-url nats://[\d.:]+", ""),
    (r"\{\{?name\}\}?", "worker-1"),
    (r"\bDIR\b", "made"),
    (r'"model": "llama"', '"model": "tiny"'),
    (r"^(sluice (chat|status|top|bench|replay)\b(?!.*--url))", r"\1 --url $URL"),
    (r"^(sluice chat\b(?!.*--pace))", r"\1 --pace off"),
    (r"^(sluice bench\b)(?!.*--dataset)", r"\1 --num-prompts 3 --input-len 20"),
    (r"^(sluice bench\b)(?!.*--output-len)(?!.*--dataset)", r"\1 --output-len 4"),
    (r"^(sluice bench .*--vocab) 4096", r"\1 300"),
    (r"^(sluice tap\b)(?!.*--count)", r"timeout --preserve-status -s INT 4 \1"),
    (r"^(sluice (simulate|compare|plan)\b)(?!.*--trace)", r"\1 --quiet --duration 1 --warm-up 0"),
    (r"^(sluice (simulate|compare)\b)", r"\1 --jobs 1"),
    (r"--memory 8GiB(?=$)", "--memory 28MiB"),
    (r" --upscale 28\b", " --upscale 2"),
    (r"^sluice up\b(?! --help)", "sluice-up"),
    (r" --port \S+| --json$", ""),
    (r"--group worker-0", '--group "$(sluice drop --workers worker-0,worker-1 | cut -d+ -f1)"'),
    (r"--for 10s", "--for 1s"),
    (r"/var/lib/nats", "store"),
)
"""What stands in a line, by a pattern, and what is typed instead: what runs here, and less of what takes long."""

FIRST: Final = {
    "sluice restore --group": "sluice restore",
    "sluice restore": "sluice restore; sluice drop --workers worker-0,worker-1",
    "sluice drop": "sluice restore",
}
"""What is typed before a line that begins so, whatever becomes of it."""

SAYS: Final = (
    (r"sluice drop", r"^worker-\d\+worker-\d in [\d.]+ s \(plan \d+\): "),
    (r"sluice restore", r" in [\d.]+ s \(plan \d+\): "),
    (r"sluice (status|top)", r"^WORKER .*\nworker-0 "),
    (r"sluice planner", r"^planner, epoch \d+: "),
    (r"sluice tap .*--count 3", r"^(\{\"ts\":.*\n){3}$"),
    (r"nats req .*worker-0\.dump", r'^\{"phase": "ready", '),
    (r"nats req .*worker-0\.steps", r'"kind":"step_log"'),
    (r"nats kv get sluice_default_view cluster", r'"kind":"cluster_view"'),
    (r"nats kv get sluice_default_view facts", r'"kind":"view_facts"'),
    (r"nats kv get sluice_default_plan", r'"kind":"plan"'),
    (r"nats req .*planner\.metrics", r"^# "),
    (r"nats sub .*report'", r"sluice\.default\.worker\.worker-\d\.report"),
    (r"nats sub sluice\.default\.view", r"sluice\.default\.view"),
    (r"nats sub .*--translate", r'^\{.*"format"'),
    (r"curl .*\"stream\"", r"data: \[DONE\]"),
    (r"curl .*tokenize", r'"token_strs"'),
    (r"sluice keys create .*--file", r"^sk-sluice-\S+\n$"),
    (r"sluice keys create --tenant me$", r"\[\[keys\]\]"),
    (r"sluice chaos", r"^$"),
    (r"sluice compare", r"fcfs .*\n"),
    (r"sluice plan\b", r"^\d+ instances? suffices?: "),
    (r"sluice nats-config", r"(nats|a)\.conf\n"),
    (r"sluice (bench|replay)", r"TTFT"),
    (r"sluice version", r"^sluice \d"),
)
"""What a line's output has, by the beginning of the line."""


def why_not(line: Line) -> str:
    return next((why for pattern, why in NOT_TYPED if re.fullmatch(pattern, str(line), re.DOTALL)), "")


def as_typed(text: str) -> str:
    for pattern, instead in PUT_IN:
        text = re.sub(pattern, instead, text)
    return text


TYPED: Final = sorted({(as_typed(line.text), line.kind) for line in LINES if not why_not(line) and line.kind == "sh"})


def with_news() -> list[str]:
    """Return the lines with a command, or an option of it, that none before has; those with many options come first."""
    seen, found = set[tuple[str, ...]](), []
    for text, _ in sorted(TYPED, key=lambda line: (-line[0].count(" -"), line)):
        verbs = re.match(r"sluice[a-z -]*(?=\s|$)", text.partition(" -")[0])
        command = verbs[0] if verbs else text
        news = {(command,), *((command, option) for option in re.findall(r" (--?[a-z-]+)", text) if verbs)}
        if not news <= seen:
            found.append(text)
        seen |= news
    return found


def last_if_it_disturbs(text: str) -> int:
    return text.startswith("sluice chaos")


IN_CI: Final = sorted(with_news(), key=lambda text: (last_if_it_disturbs(text), text))
OTHERS: Final = sorted(
    {text for text, _ in TYPED}.difference(IN_CI), key=lambda text: (last_if_it_disturbs(text), text)
)


WHICH: Final = {"chat": "--url ", "watch": "--url ", "logs": "--cluster "}
"""How a command is told which cluster is meant."""


@contextmanager
def up(place: Place, line: str, last: str = "print(chunk") -> Iterator[tuple[str, dict[str, str]]]:
    """Type a line that starts a cluster at a free port; give what it prints up to its last line, and the table in it.

    Args:
        place: where it is typed.
        line: without a port.
        last: what the last line has.
    """
    with (place.folder / "up.log").open("w") as log:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {line} --port 0"],
            cwd=place.folder,
            env=place.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None
    text = ""
    try:
        while last not in text:
            row = process.stdout.readline()
            assert row, (place.folder / "up.log").read_text()[-4000:]
            text += row
        yield text, printed_table(text)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Where lines are typed, beside the cluster of groups in docs/operations.md, with the broker's URL as printed."""
    place = Place(tmp_path_factory.mktemp("pasting") / "here", group_env())
    line = next(line.text for line in LINES if "--system kunserve --memory" in line.text and "operations" in line.place)
    line = as_typed(line).replace("sluice-up", "sluice up") + " --served-model-name tiny --verbose"
    with up(place, line) as (text, table):
        words = shlex.split(table["events"])
        place.env |= {"URL": table["API"].removesuffix("/v1"), "NATS_URL": words[words.index("--server") + 1]}
        place.env["PRINTED"] = text
        yield place


def test_every_entry_of_the_list_is_needed() -> None:
    found = [str(line) for line in LINES]
    assert [
        pattern for pattern, _ in NOT_TYPED if not any(re.fullmatch(pattern, each, re.DOTALL) for each in found)
    ] == []
    assert [start for start, _ in SAYS if not any(re.match(start, text) for text, _ in typed_as_written())] == []


def typed_as_written() -> list[tuple[str, str]]:
    return [(re.sub(r"^timeout \S+ \S+ \S+ \S+ ", "", text), kind) for text, kind in TYPED]


@pytest.mark.parametrize("line", [line for line in LINES if why_not(line) and line.kind == "sh"], ids=str)
def test_what_is_not_typed_names_what_there_is(line: Line) -> None:
    words = [word for word in line.text.replace("[", " ").replace("]", " ").split() if not re.match(r"[A-Z_]+=", word)]
    if words[:2] in (["python", "-m"], ["python3", "-m"]) and "<name>" not in line.text:
        assert importlib.util.find_spec(words[2]) is not None
    elif "sluice" in words and words[0] != "sudo":
        command: click.Command = cli
        for word in words[words.index("sluice") + 1 :]:
            if not isinstance(command, click.Group) or word not in command.commands:
                break
            command = command.commands[word]
        assert command is not cli
        known = {opt for parameter in command.params for opt in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= {*known, "--help"}
    elif words[0] == "make" and "docs/results/" not in line.place:
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("text", first_of([*IN_CI, *OTHERS], in_ci=len(IN_CI)))
def test_a_line_does_what_is_said(place: Place, text: str) -> None:
    if before := next((before for start, before in FIRST.items() if text.startswith(start)), ""):
        place.type(before)
    done = place.type(text, "Hello.\n")
    ends = (0, 130) if text.startswith("timeout") else (0,)  # where the machine is slow it had not begun
    assert done.returncode in ends, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    for start, expected in SAYS:
        if re.match(start, re.sub(r"^timeout .*INT 4 ", "", text)):
            assert re.search(expected, done.stdout, re.MULTILINE), f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    "line", [line for line in LINES if line.kind == "python" and not why_not(line)], ids=lambda line: line.place
)
def test_an_example_in_python_prints_an_answer(place: Place, line: Line) -> None:
    code = line.text.replace("http://127.0.0.1:8000", place.env["URL"])
    place.wait_until_ready()
    for _ in rounds("an answer is more than a few tokens long", 3):  # one in twenty of the model's is not
        done = place.type(f"python -c {shlex.quote(code)}")
        assert done.returncode == 0, done.stderr
        if len(done.stdout) > 20:
            break


def type_what_up_prints(place: Place, text: str, table: dict[str, str]) -> None:
    for name in ("state", "chat", "events"):
        line = table[name].replace("sluice chat", "sluice chat --pace off")
        done = place.type(line, "Hello.\n")
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    for name in ("models", "metrics"):
        key = ' -H "Authorization: Bearer $SLUICE_API_KEY"'
        assert place.type(f"curl -sf{key} {table[name]}").stdout
    assert place.type(f"sluice status --url {table['API']}").stdout.startswith("WORKER")
    curl = next(row for row in text.splitlines() if row.startswith("curl "))
    assert "data: [DONE]" in place.type(curl).stdout
    code = text[text.index("import os\n" if "import os\n" in text else "from openai") :]
    assert len(place.type(f"python -c {shlex.quote(code)}").stdout) > 20


def test_what_up_prints_is_typed(place: Place) -> None:
    text = place.env["PRINTED"]
    place.wait_until_ready()
    type_what_up_prints(place, text, printed_table(text))


def test_what_up_prints_with_keys_is_typed_with_the_key_of_the_readme(tmp_path: Path) -> None:
    place = Place(tmp_path / "keys")
    create, serve = (
        as_typed(line.text).replace("sluice-up", "sluice up")
        for line in LINES
        if line.place == "README.md" and "keys.toml" in line.text
    )
    place.env["SLUICE_API_KEY"] = place.type(create).stdout.strip()
    key = place.env.pop("SLUICE_API_KEY")
    with up(place, f"{serve} --verbose") as (text, table):
        place.env["SLUICE_API_KEY"] = key
        type_what_up_prints(place, text, table)


def test_what_most_people_do_next_is_typed(tmp_path: Path) -> None:
    """The cluster is the only one of its user, so that commands find it; then it is one of two, and they are told."""
    place = Place(tmp_path / "next", {"XDG_RUNTIME_DIR": str(tmp_path / "runtime")})
    (tmp_path / "runtime").mkdir(mode=0o700)
    with up(place, "sluice up", "sluice logs") as (_, alone), up(place, "sluice up", "sluice logs") as (_, second):
        assert (alone["chat"], alone["watch"], alone["logs"]) == ("sluice chat", "sluice top", "sluice logs -f")
        assert all(second["API"].removesuffix("/v1") in second[name] for name in ("chat", "watch"))
        for table in (second, alone):
            for name in ("chat", "watch", "logs"):
                line = table[name].replace("sluice chat", "sluice chat --pace off").replace("logs -f", "logs")
                done = place.type(line if table is second else f"{line} {WHICH[name]}{alone['API'][:-3]}", "Hello.\n")
                assert (done.returncode, bool(done.stdout)) == (0, True), done.stderr


def test_a_broker_of_ones_own(tmp_path: Path) -> None:
    """The lines of `sluice nats-config --help` in their order, at free ports."""
    from tests.support.ports import free_port

    port, monitoring = free_port(), free_port()
    place = Place(tmp_path / "own", {"NATS_URL": f"nats://127.0.0.1:{port}"})
    config, _, server, setup, _ = (line.text for line in LINES if line.place == "sluice nats-config --help")
    listen = f" --listen 127.0.0.1:{port} --http 127.0.0.1:{monitoring}"
    assert place.type(config.replace("/var/lib/nats", "store") + listen).returncode == 0
    process = subprocess.Popen(
        ["bash", "-c", f"exec {server}"], cwd=place.folder, env=place.env, stderr=subprocess.DEVNULL
    )
    try:
        done = place.type(setup)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["sluice_default_view", "sluice_default_plan", "sluice_default_owners"]
    finally:
        process.terminate()
        wait_until(lambda: process.poll() is not None, "the broker ends")


@pytest.mark.parametrize("text", ["simulate", "compare --systems fcfs,oracle --jobs 2", "plan --slo ttft=1,tpot=0.1"])
@pytest.mark.parametrize("after_s", [1.0, 2.5])
def test_an_interrupted_simulation_says_nothing(tmp_path: Path, text: str, after_s: float) -> None:
    """Wherever it was: also its children, which begin by importing for a while, and are interrupted with it."""
    place = Place(tmp_path / "here")
    done = place.type(f"timeout --preserve-status -s INT {after_s} sluice {text} --quiet")
    assert (done.returncode, done.stderr.strip()) == (130, "")


@pytest.mark.parametrize("text", ["--help", "keys create --tenant me", "keys", "simulate --help", "status", "tap"])
def test_nobody_who_reads_is_no_error(place: Place, text: str) -> None:
    done = place.type(f"timeout --preserve-status -s INT 3 sluice {text} | true")
    assert "Traceback" not in done.stderr + done.stdout
    assert "Exception" not in done.stderr + done.stdout


@pytest.mark.parametrize("group", ["keys", "chaos"])
def test_a_command_that_lacks_its_verb_shows_its_help_as_it_is_laid_out(tmp_path: Path, group: str) -> None:
    place = Place(tmp_path / "here")
    assert place.type(f"sluice {group}").stderr == place.type(f"sluice {group} --help").stdout


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("sluice chat --url http://127.0.0.1:1 <&-", 3),
        ("sluice tap --decode <&-", 0),
        ("sluice version >&-", 0),
        ("sluice keys create --tenant me >/dev/full", 1),
        ("sluice --help >/dev/full", 1),
    ],
)
def test_streams_that_are_closed_or_full_are_one_line_at_most(tmp_path: Path, line: str, code: int) -> None:
    done = Place(tmp_path / "here").type(line)
    assert (done.returncode, done.stderr.count("\n") <= 1, "Traceback" in done.stderr) == (code, True, False), (
        done.stderr
    )
