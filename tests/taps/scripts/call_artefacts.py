"""A process that knows nothing of the model: loads each artefact in a folder, and runs it forward and backward."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

warnings.simplefilter("ignore")


def load(path: Path) -> Any:
    kind = path.name.split(".")[0]
    if kind == "exported":
        return torch.export.load(path).module()
    if kind == "scripted":
        return torch.jit.load(path)
    if kind == "traced":
        return torch.jit.load(path)
    if kind == "packaged":
        from torch.package.package_importer import PackageImporter

        return PackageImporter(path).load_pickle("model", "model.pkl")
    if kind == "saved":
        return torch.load(path, weights_only=False)
    assert kind == "inductor", kind
    return torch._inductor.aoti_load_package(str(path))


def main() -> None:
    folder = Path(sys.argv[1])
    sys.path.insert(0, sys.argv[2])  # where the classes of what is saved by name lie
    x = torch.load(folder / "batch.pt")
    for path in sorted(folder.glob("*.pt2")):
        model = load(path)
        output = model(x)
        if output.requires_grad:
            output.square().mean().backward()
        torch.save(output.detach(), folder / f"{path.name}.out")


if __name__ == "__main__":
    main()
