"""The examples of the client's README run as they stand, but for a page: tests/integration/test_real_browser.py."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.support.javascript import CLIENT, NODE, run_node
from tests.support.openai_server import WHOLE, WORDS, Server, running, stream

README = Path(__file__).parents[3] / "client" / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_there_are_three_examples_the_synchronous_one_first() -> None:
    made = [re.findall(r"\b(\w+)\(\"?(?:http|base_url)", example) for example in EXAMPLES]
    assert made == [["SluiceClient"], ["AsyncSluiceClient"], ["AsyncOpenAI"]]


@pytest.mark.parametrize("index", [0, 1, 2], ids=["sdk", "asyncio", "openai"])
async def test_example_prints_the_answer_and_its_qoe(index: int, capsys: pytest.CaptureFixture[str]) -> None:
    async with running(Server(stream(WHOLE))) as url:
        code = EXAMPLES[index].replace("http://127.0.0.1:8000", url)
        assert url in code
        await asyncio.to_thread(exec, compile(code, README.name, "exec"), {})
    output = capsys.readouterr().out
    assert output.startswith("".join(WORDS))
    assert re.search(r"QoE (1\.00|0\.\d\d)", output)


@pytest.mark.skipif(NODE is None, reason="node is not on PATH: the example in JavaScript was not run")
async def test_example_in_javascript_prints_the_answer_and_its_qoe(tmp_path: Path) -> None:
    (code,) = re.findall(r"```js\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "sluice-client").symlink_to(CLIENT)  # as npm does
    async with running(Server(stream(WHOLE))) as url:
        (tmp_path / "story.mjs").write_text(code.replace("http://127.0.0.1:8000", url))
        output = await run_node(["story.mjs"], tmp_path)
    assert output.startswith("".join(WORDS))
    assert re.search(r"stop, QoE (1\.00|0\.\d\d), first token after \d+\.\d\d s\n$", output)
