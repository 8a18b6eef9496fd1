"""The map of tokens of `recorder report --align`: samples down, tokens across, and the modules of a chosen token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import recorder
from recorder.run.probe import token_blocks
from tests.browser.conftest import Open
from tests.rigs.command_line import Cli, cli
from tests.rigs.rollouts import RULES, llama, prompts, whole_mask, write

__all__ = ["cli"]


def test_a_token_shows_its_modules_and_the_one_that_parts_first(open_page: Open, tmp_path: Path, cli: Cli) -> None:
    ids, mask = prompts()
    engine = llama()
    with torch.no_grad():
        engine.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    texts = write(tmp_path / "engine", engine, ids, mask)
    words = [[f"<{int(token)}>" for token in row] for row in texts]
    with (
        recorder.attach(model := llama(), enabled=True, dir=str(tmp_path / "trainer"), roots="any", rules=RULES),
        recorder.tokens(texts=words),
    ):
        other = 63 - texts[:1]  # a sample that the engine does not have
        here = torch.ones_like(other)
        model(input_ids=torch.cat([texts, other]), attention_mask=torch.cat([whole_mask(mask), here]))
    page = tmp_path / "page.html"
    written = cli("report", tmp_path / "trainer", "--align", tmp_path / "engine", "-o", page)
    assert written.exit_code == 0, written.err
    opened = open_page(page)
    assert "trainer and engine part at 'model.layers.1.mlp.up_proj' output" in opened.text("#align-verdict")
    labels = opened.page.locator("#panel-tokens .heat-label").all_inner_texts()
    assert sorted(labels) == ["sample 0", "sample 1", "sample 2"]
    pixels = opened.pixels("#panel-tokens .heat-chunk")
    assert len(np.unique(pixels.reshape(-1, 4), axis=0)) > 5
    cells: Any = opened.page.locator("#panel-tokens .heat-cells")
    cells.focus()
    for _ in range(9):  # the tokens from the seventh on were decoded
        cells.press("ArrowRight")
    row = labels.index("sample 0")
    for _ in range(row):
        cells.press("ArrowDown")
    cells.press("Enter")
    assert f'sample 0, position 8 · token {int(texts[0, 8])} "<{int(texts[0, 8])}>"' in opened.text("#token-depth h3")
    first = opened.page.locator("#token-depth tr.chosen td").all_inner_texts()
    assert first[0] == "model.layers.1.mlp.up_proj" and first[3] == "parts first"
    depth = opened.page.locator("#token-depth tbody tr td:first-child").all_inner_texts()
    assert depth.index("model.embed_tokens") < depth.index("model.layers.0.mlp") < depth.index("model.norm")


def test_a_run_without_texts_holds_none(tmp_path: Path) -> None:
    write(tmp_path / "engine", llama(), *prompts())
    blocks = list(token_blocks(recorder.open_run(tmp_path / "engine").writers))
    assert blocks and not any("texts" in call for block in blocks for call in block.calls)
