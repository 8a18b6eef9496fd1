"""Every kind of tensor at every site: bit for bit, as what it is made of, or counted by its kind, as FORMAT.md says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.masked import masked_tensor
from torch.utils._pytree import tree_map_only

import recorder
from recorder.format.fingerprint import fingerprint
from recorder.numerics.dtypes import item_bytes
from tests.rigs.capturing import Recording, Tiny, batch, flagged

pytestmark = [
    # Sparse, nested, quantised and masked tensors call themselves prototypes or on their way out.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
FORMAT = Path(recorder.__file__).parent / "format" / "FORMAT.md"


class Renamed(torch.Tensor):
    """A subclass with a method of its own and no more."""

    def shown(self) -> str:
        return "mine"


class Opaque(torch.Tensor):
    """Handles every operation itself and says nothing of what is inside."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"nobody may call {func} on it")


class Scaled(torch.Tensor):
    """Data and scale, each a tensor: a wrapper as quantised training makes them."""

    data_: torch.Tensor
    scale_: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=torch.float32, requires_grad=data.requires_grad
        )

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_, self.scale_ = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale_"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], spec: None, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["data_"], inner["scale_"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def on(field: str) -> Any:
            return func(*tree_map_only(Scaled, lambda t: getattr(t, field), args), **(kwargs or {}))

        return Scaled(on("data_"), args[0].scale_ if isinstance(args[0], Scaled) else args[1].scale_)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


@dataclass(frozen=True)
class Kind:
    line: str
    """The line of FORMAT.md's table that it falls under."""
    make: Callable[[], torch.Tensor]
    inside: Callable[[Any], Mapping[str, torch.Tensor]] | None = lambda t: {"": t.detach()}
    """What rows hold by name; None where it is counted."""


PLAIN = "strided, of an element type above"
SUBCLASS = "a subclass with `__tensor_flatten__`"


def eight(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(8.0).reshape(2, 4).to(dtype)


def turned(dtype: torch.dtype) -> torch.Tensor:
    return eight(dtype).t()


def quantized(dtype: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_tensor(eight(), 0.1, 2, dtype).t()


def attributes(*names: str) -> Callable[[Any], dict[str, torch.Tensor]]:
    return lambda t: {name: getattr(t, name) for name in names}


def called(*names: str) -> Callable[[Any], dict[str, torch.Tensor]]:
    return lambda t: {name: getattr(t.detach(), name)() for name in names}


def per_tensor(t: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = torch.tensor(t.q_scale(), dtype=torch.float64)
    return {"int_repr": t.int_repr(), "scale": scale, "zero_point": torch.tensor(t.q_zero_point())}


def per_channel(t: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "int_repr": t.int_repr(),
        "scale": t.q_per_channel_scales(),
        "zero_point": t.q_per_channel_zero_points(),
        "axis": torch.tensor(t.q_per_channel_axis()),
    }


def jagged(**options: Any) -> torch.Tensor:
    parts = [torch.ones(2, 3), torch.arange(12.0).reshape(4, 3)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, **options)


def uncoalesced() -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[2, 0, 2]]), torch.arange(6.0).reshape(3, 2), (4, 2))


def waited_for() -> torch.Tensor:
    found = AsyncCollectiveTensor(eight())
    found.completed = True
    return found


def on_mesh(local: torch.Tensor, placement: Any) -> torch.Tensor:
    return DTensor.from_local(local, init_device_mesh("cpu", (1,)), [placement], run_check=False)


def no_numbers(name: str) -> Kind:
    return Kind("another dtype", lambda: torch.empty(4, dtype=getattr(torch, name)), None)


def kinds() -> Iterator[tuple[str, Kind]]:
    for name in (
        *("bfloat16", "float16", "float64", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "bool"),
        *("complex32", "complex64", "complex128"),
    ):
        dtype = getattr(torch, name)
        yield name, Kind(PLAIN, partial(eight, dtype))
        yield f"{name}_turned", Kind(PLAIN, partial(turned, dtype))
    pairs = torch.arange(8, dtype=torch.uint8).reshape(2, 4)
    yield "float4", Kind(PLAIN, lambda: pairs.view(torch.float4_e2m1fn_x2))
    yield "float4_turned", Kind(PLAIN, lambda: pairs.view(torch.float4_e2m1fn_x2).t())
    yield "not_finite", Kind(PLAIN, lambda: torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]))
    yield "number", Kind(PLAIN, lambda: torch.tensor(3.5))
    yield "empty", Kind(PLAIN, lambda: eight()[:0, ::2])
    yield "every_second", Kind(PLAIN, lambda: eight()[:, ::2])
    yield "expanded", Kind(PLAIN, lambda: torch.ones(1).expand(1000, 500))
    yield (
        "channels_last",
        Kind(PLAIN, lambda: torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)),
    )
    yield "conjugated", Kind(PLAIN, lambda: torch.complex(eight(), eight()).conj())
    yield "negated", Kind(PLAIN, lambda: torch.complex(eight(), eight()).conj().imag)
    yield "zero", Kind(PLAIN, lambda: torch._efficientzerotensor((2, 3)), lambda t: {"": torch.zeros(2, 3)})
    yield "parameter", Kind(PLAIN, lambda: nn.Parameter(eight()))
    yield "methods", Kind("a subclass with Python methods alone", lambda: eight().as_subclass(Renamed))
    yield "coo", Kind("sparse COO", lambda: eight().to_sparse(), called("_indices", "_values"))
    yield "uncoalesced", Kind("sparse COO", uncoalesced, called("_indices", "_values"))
    crow = called("crow_indices", "col_indices", "values")
    ccol = called("ccol_indices", "row_indices", "values")
    yield "csr", Kind("sparse CSR, BSR", lambda: eight().requires_grad_().to_sparse_csr(), crow)
    yield "bsr", Kind("sparse CSR, BSR", lambda: eight().to_sparse_bsr((2, 2)), crow)
    yield "csc", Kind("sparse CSC, BSC", lambda: eight().to_sparse_csc(), ccol)
    yield "bsc", Kind("sparse CSC, BSC", lambda: eight().to_sparse_bsc((2, 2)), ccol)
    for dtype in (torch.qint8, torch.quint8, torch.qint32):
        yield (
            f"per_tensor_{dtype}".replace("torch.", ""),
            Kind(
                "quantised per tensor",
                partial(quantized, dtype),
                per_tensor,
            ),
        )
    scales, zeros = torch.tensor([0.1, 0.3]), torch.tensor([1, 2])
    yield (
        "per_channel",
        Kind(
            "quantised per channel",
            lambda: torch.quantize_per_channel(eight(), scales, zeros, 0, torch.qint8),
            per_channel,
        ),
    )
    yield (
        "four_bits",
        Kind(
            "quantised to less than a byte",
            lambda: torch.quantize_per_channel(eight(), scales, zeros.float(), 0, torch.quint4x2),
            None,
        ),
    )
    yield "jagged", Kind("nested, jagged", jagged, attributes("_values", "_offsets"))
    yield "nested", Kind("nested, strided", lambda: torch.nested.nested_tensor([eight()[0], eight()[1, :2]]), None)
    yield (
        "masked",
        Kind("`MaskedTensor`", lambda: masked_tensor(eight(), eight() > 3), attributes("_masked_data", "_masked_mask")),
    )
    yield (
        "scaled",
        Kind(SUBCLASS, lambda: Scaled(eight(torch.float8_e4m3fn), torch.tensor(0.5)), attributes("data_", "scale_")),
    )
    yield (
        "deep",
        Kind(
            SUBCLASS,
            lambda: Scaled(Scaled(eight(), torch.tensor(2.0)), eight().to_sparse()),
            lambda t: {
                "data_.data_": t.data_.data_,
                "data_.scale_": t.data_.scale_,
                "scale_._indices": t.scale_._indices(),
                "scale_._values": t.scale_._values(),
            },
        ),
    )
    yield "dtensor", Kind("`DTensor`", lambda: on_mesh(eight(), Shard(0)), lambda t: {"": t.to_local()})
    yield (
        "dtensor_scaled",
        Kind(
            SUBCLASS,
            lambda: on_mesh(Scaled(eight(torch.float8_e5m2), torch.tensor(0.5)), Shard(0)),
            lambda t: {name: getattr(t._local_tensor, name) for name in ("data_", "scale_")},
        ),
    )
    yield "waited_for", Kind("`AsyncCollectiveTensor`", waited_for, lambda t: {"": t.elem})
    yield "under_way", Kind("`AsyncCollectiveTensor`", lambda: AsyncCollectiveTensor(eight()), lambda t: {"": t.elem})
    yield "mkldnn", Kind("mkldnn", lambda: eight().to_mkldnn(), None)
    yield "meta", Kind("meta", lambda: torch.empty(3, device="meta"), None)
    yield "fake", Kind("fake", lambda: FakeTensorMode().from_tensor(eight()), None)
    yield "lazy_parameter", Kind("uninitialized", nn.UninitializedParameter, None)
    yield "lazy_buffer", Kind("uninitialized", nn.UninitializedBuffer, None)
    yield "opaque", Kind("any other subclass", lambda: eight().as_subclass(Opaque), None)
    for bits in range(1, 8):
        yield f"int{bits}", no_numbers(f"int{bits}")
        yield f"uint{bits}", no_numbers(f"uint{bits}")
    yield "bits8", no_numbers("bits8")


KINDS = dict(kinds())
SHOWN_AS = {"_indices": "indices", "_values": "values"}
"""Methods of a sparse COO tensor, and the names of what they show."""


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def inside(kind: Kind, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """What should be recorded, by what follows the tensor's name."""
    assert kind.inside is not None
    is_coo = "COO" in kind.line or kind is KINDS["deep"]

    def name_of(path: str) -> str:
        *above, last = path.split(".")
        return ".".join([*above, SHOWN_AS.get(last, last) if is_coo else last])

    return {name_of(path): tensor for path, tensor in kind.inside(value).items()}


def bits(tensor: torch.Tensor) -> tuple[str, list[int], bytes]:
    own = tensor.detach()
    with torch._C.DisableTorchFunctionSubclass():
        own = own.as_subclass(torch.Tensor) if type(own) is Renamed else own
        own = own.resolve_conj().resolve_neg()
    # torch 2.9 has no copy of pairs of half bytes
    as_copied = own.view(torch.uint8) if own.dtype == torch.float4_e2m1fn_x2 else own
    data = as_copied.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(own.dtype).removeprefix("torch."), list(own.shape), data


def joined(*names: str) -> str:
    return ".".join(name for name in names if name)


def expected_rows(values: Mapping[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    return {
        joined(prefix, name, suffix): tensor
        for name, value in values.items()
        if KINDS[name].inside is not None
        for suffix, tensor in inside(KINDS[name], value).items()
    }


def reasons(values: Mapping[str, torch.Tensor], times: int = 1) -> dict[str, int]:
    """What the ledger should say of the kinds that are counted."""
    found: dict[str, int] = {}
    for name in values:
        if KINDS[name].inside is None:
            reason = reason_of(name, KINDS[name])
            found[reason] = found.get(reason, 0) + times
    return found


def reason_of(name: str, kind: Kind) -> str:
    known = {
        "four_bits": "quint4x2",
        "fake": "FakeTensor",
        "lazy_parameter": "uninitialized",
        "lazy_buffer": "uninitialized",
        "opaque": "Opaque",
    }
    return f"unsupported_type:{known.get(name, name)}"


def assert_recorded(recording: Recording, site: str, expected: Mapping[str, torch.Tensor], path: str = "") -> None:
    rows = recording.rows(site=site, module_path=path)
    assert set(rows.name) == set(expected)
    for name, tensor in expected.items():
        actual = recording.run.tensor(path, site=site, name=name)
        assert bits(actual) == bits(tensor), (site, name)


@pytest.mark.parametrize("keep", ["tensor", "stats", "fingerprint"])
def test_every_kind_is_recorded_bit_for_bit_or_counted_by_its_kind(tmp_path: Path, keep: str) -> None:
    values = {name: kind.make() for name, kind in KINDS.items()}
    with flagged(tmp_path, f"site=tap keep={keep}", status_interval_s=0) as recording:
        Tiny()(batch())
        for name, value in values.items():
            assert recorder.tap(name, value) is value
    expected = expected_rows(values)
    ledger = recording.manifest["ledger"]
    assert ledger["dropped"] == reasons(values)
    assert ledger["observed"] == ledger["written"] + sum(ledger["dropped"].values())
    rows = recording.rows(site="tap").set_index("name")
    assert set(rows.index) == set(expected)
    if keep == "tensor":
        assert_recorded(recording, "tap", expected)
    for name, tensor in expected.items():
        dtype, shape, data = bits(tensor)
        row = rows.loc[name]
        assert (row["dtype"], json.loads(str(row["shape"]))) == (dtype, shape), name
        if keep == "fingerprint":
            wanted = fingerprint(np.frombuffer(data, np.uint8), item_bytes(dtype), tuple(shape))
            assert row["fingerprint"] == f"{wanted:016x}", name
        if keep == "stats":
            without = dtype == "float4_e2m1fn_x2"
            assert pd.isna(row["zero_count"]) if without else row["zero_count"] == num_zeros(tensor), name


def num_zeros(tensor: torch.Tensor) -> int:
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return int((plain.to(torch.complex128 if plain.is_complex() else torch.float64) == 0).sum())


def test_the_table_in_the_specification_is_what_happens() -> None:
    table = {
        line: re.findall(r"`([^`]*)`", rows)
        for line, rows in re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", FORMAT.read_text(), re.MULTILINE)
    }
    for name, kind in KINDS.items():
        said = table[kind.line]
        if kind.inside is None:
            pattern = re.escape(said[0]).replace("KIND", r"\w+")
            assert re.fullmatch(pattern, reason_of(name, kind)), name
        elif kind.line != SUBCLASS:  # whose names are its own
            optional = {"_lengths"}
            assert set(inside(kind, kind.make())) - {""} == set(said) - optional, name


class Passes(nn.Module):
    """Gives on what it was given, and holds the same as buffers."""

    def __init__(self, buffers: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        for name, value in buffers.items():
            self.register_buffer(f"a_{name}", value)

    def forward(self, given: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"given": given, "loss": (self.weight * 2).sum()}


def test_every_kind_is_seen_at_every_site_and_training_goes_on(tmp_path: Path) -> None:
    values = {name: kind.make() for name, kind in KINDS.items()}

    def train() -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
        model = Passes(values)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        out = model(values)
        out["loss"].backward()
        optimizer.state[model.weight] = cast("Any", dict(values))
        optimizer.step()
        return out["given"], model.weight.detach().clone(), torch.get_rng_state()

    before = {name: value.requires_grad for name, value in values.items() if "lazy" not in name}
    without = train()
    with flagged(
        tmp_path, "site=input,output,grad_output,grad_input,buffer,optim keep=tensor", status_interval_s=0
    ) as recording:
        given, weight, rng_state = train()
    assert all(given[name] is value for name, value in values.items())
    assert torch.equal(weight, without[1]) and torch.equal(rng_state, without[2])
    assert {name: value.requires_grad for name, value in values.items() if "lazy" not in name} == before
    ledger = recording.manifest["ledger"]
    assert ledger["dropped"] == reasons(values, times=4)
    assert ledger["observed"] == ledger["written"] + sum(ledger["dropped"].values())
    loss = {"loss": torch.tensor(4.0)}
    assert_recorded(recording, "input", expected_rows(values, "given"))
    assert_recorded(recording, "output", expected_rows(values, "given") | loss)
    assert_recorded(recording, "buffer", {f"a_{name}": value for name, value in expected_rows(values).items()})
    assert_recorded(recording, "optim", expected_rows(values, "weight"))


def test_a_subclass_of_the_users_is_asked_nothing(tmp_path: Path) -> None:
    asked = []

    class Listens(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    def run() -> list[Any]:
        model = Passes({"a_buffer": eight().as_subclass(Listens)})
        given = {"plain": eight().as_subclass(Listens), "leaf": eight().as_subclass(Listens).requires_grad_()}
        given["inner"] = given["leaf"] * 2
        asked.clear()
        model(given)["given"]["inner"].as_subclass(torch.Tensor).sum().backward()
        return [getattr(function, "__name__", "") for function in asked]

    without = run()
    with flagged(tmp_path) as recording:
        assert run() == without
    rows = recording.rows()
    assert {"given.plain", "given.leaf", "given.inner"} == set(rows[rows.site == "input"].name)
    assert "given.inner" in set(rows[rows.site == "grad_output"].name)
    assert recording.manifest["ledger"]["dropped"] == {}


def test_what_a_row_was_inside_of_stands_beside_it(tmp_path: Path) -> None:
    with flagged(tmp_path, "site=tap keep=tensor") as recording:
        Tiny()(batch())
        for name in ("scaled", "deep", "uncoalesced", "jagged", "dtensor", "dtensor_scaled"):
            recorder.tap(name, KINDS[name].make())
        recorder.tap("replica", on_mesh(Scaled(eight(), eight()), Replicate()))
    rows = recording.rows(site="tap").set_index("name")
    notes = {name: json.loads(note) if isinstance(note, str) else {} for name, note in rows["note"].items()}
    scaled = {"inner_of": {"kind": "Scaled", "dtype": "float32", "shape": [2, 4]}}
    assert notes["scaled.data_"] == notes["scaled.scale_"] == notes["deep.data_.data_"] == scaled
    assert notes["uncoalesced.values"]["inner_of"] == {"kind": "sparse_coo", "dtype": "float32", "shape": [4, 2]}
    assert notes["jagged._values"]["inner_of"]["shape"] == [2, None, 3]
    assert notes["dtensor"] == {}
    assert notes["dtensor_scaled.data_"] == scaled, "of the local tensor's shape, so in its place"
    assert notes["dtensor_scaled.scale_"] == scaled | {"no_layout": "inner_tensor"}
    global_shapes = rows["global_shape"].dropna().to_dict()
    assert global_shapes == dict.fromkeys(
        ("dtensor", "dtensor_scaled.data_", "replica.data_", "replica.scale_"), "[2,4]"
    )


def test_gradients_and_parameters_of_composite_kinds_are_recorded_in_the_same_way(tmp_path: Path) -> None:
    class Composite(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3, sparse=True)
            self.linear = nn.Linear(3, 3)
            self.scaled = nn.Parameter(Scaled(eight(), torch.tensor(0.5)), requires_grad=False)
            self.lazy = nn.UninitializedParameter()

        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            rows = torch.nested.nested_tensor_from_jagged(self.embed(indices), torch.tensor([0, 2, 5]))
            return self.linear(rows)  # type: ignore[no-any-return]

    seen: dict[str, torch.Tensor] = {}

    def train() -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = Composite()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        out = model(torch.tensor([4, 1, 1, 0, 4]))
        out.register_hook(lambda gradient: seen.update(grad_output=gradient.values().detach().clone()))
        seen["output"] = out.values().detach().clone()
        out.values().square().sum().backward()
        assert model.embed.weight.grad is not None
        assert not model.embed.weight.grad.is_coalesced()
        seen["indices"], seen["values"] = model.embed.weight.grad._indices(), model.embed.weight.grad._values().clone()
        optimizer.step()
        return [parameter.detach().clone() for parameter in (model.embed.weight, model.linear.weight)]

    without = train()
    with flagged(tmp_path) as recording:
        trained = train()
    assert all(torch.equal(a, b) for a, b in zip(trained, without, strict=True))
    assert recording.manifest["ledger"]["dropped"] == {"unsupported_type:uninitialized": 1}
    for site in ("output", "grad_output"):
        assert torch.equal(recording.run.tensor("linear", site=site, name="_values"), seen[site])
    for name in ("indices", "values"):
        assert torch.equal(recording.run.tensor("embed", site="grad", name=f"weight.{name}"), seen[name])
    assert torch.equal(recording.run.tensor("", site="param", name="scaled.data_"), eight())
    assert {"_values", "_offsets"} <= set(recording.rows(site="grad_output", module_path="").name)


def test_the_gradient_of_a_wrapper_is_recorded_as_what_is_inside_of_it(tmp_path: Path) -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    seen = []
    with flagged(tmp_path) as recording:
        model = Doubles()
        x = Scaled(eight(), torch.tensor(0.5)).requires_grad_()
        out = model(x)
        out.register_hook(lambda gradient: seen.append(gradient.data_.clone()))
        out.backward(Scaled(eight() + 1, torch.tensor(0.25)))
    assert recording.manifest["ledger"]["dropped"] == {}
    assert torch.equal(recording.run.tensor("", site="grad_output", name="data_"), seen[0])
    assert torch.equal(recording.run.tensor("", site="grad_output", name="scale_"), torch.tensor(0.25))
    assert torch.equal(recording.run.tensor("", site="grad_input", name="x.data_"), (eight() + 1) * 2)


@pytest.mark.parametrize("make", [lambda: torch.empty(3 << 28), lambda: torch.ones(1).expand(1 << 62)])
def test_what_no_pool_holds_is_counted_before_anything_is_copied(
    tmp_path: Path, make: Callable[[], torch.Tensor]
) -> None:
    # Python's loops: the compiled ones need no room for what they measure in the hook, where training has every core.
    with flagged(tmp_path, "site=tap keep=stats", pool_bytes="8MiB", native="0") as recording:
        Tiny()(batch())
        recorder.tap("huge", make())
        recorder.tap("expanded", torch.ones(1).expand(1_000_000))
    assert recording.manifest["ledger"]["dropped"] == {"too_large": 1}
    assert recording.rows(site="tap")["sum"].tolist() == [1e6]


def test_a_wrapper_that_fails_to_say_what_is_inside_is_counted_and_training_goes_on(tmp_path: Path) -> None:
    class Broken(Scaled):
        def __tensor_flatten__(self) -> tuple[list[str], None]:
            raise RuntimeError("on purpose")

    with flagged(tmp_path, "site=output keep=tensor") as recording:
        Passes({})({"broken": Broken(eight(), eight()), "sound": eight()})
    assert recording.manifest["ledger"]["dropped"] == {"hook_error": 1}
    assert set(recording.rows().name) == {"given.sound", "loss"}
    assert any("on purpose" in message for message in recording.events("hook_error"))
