"""Training as users write it, in every layout; it knows nothing of the recorder unless asked to by ``--tap``.

It saves what a twin run must reproduce bit by bit and, with ``--watch``, what plain hooks and plain reads see of every
value. In the model: dropout, an activation that works in place, a sum that overwrites a module's output, a module that
is called twice, buffers that move, nested inputs and outputs, and dims that two ranks cannot share evenly.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
import pickle
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

LAYOUTS = ("plain", "ddp", "fsdp1", "fsdp1 orig", "fsdp2", "compile", "checkpoint")
WIDTH, HIDDEN = 5, 7
MICRO_BATCHES = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.25)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tap(self, "given", x)
        h: Tensor = self.down(self.drop(self.act(self.up(self.norm(x)))))
        h += x
        tap(self, "weight", self.up.weight)  # FSDP frees its storage when this returns
        return tap(self, "residual", h)


class Net(nn.Module):
    running: Tensor
    num_calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("running", torch.zeros(WIDTH))
        self.register_buffer("num_calls", torch.tensor(0))

    def forward(self, batch: dict[str, Any], *, gain: Tensor) -> dict[str, Any]:
        x = batch["features"] + batch["more"][0]
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        x = self.shared(self.shared(x))
        if self.training:
            self.num_calls += 1
            self.running.lerp_(x.detach().float().mean(0), 0.1)
        return {"prediction": self.head(x * gain), "hidden": hidden}


class Watch:
    """What plain hooks and plain reads see, by key: site, path, name, step, micro_step, call, repeat, mode, phase."""

    def __init__(self, model: nn.Module) -> None:
        self.paths = {module: path for path, module in model.named_modules()}
        self.values: dict[tuple[Any, ...], Tensor] = {}
        self.layouts: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.model = model  # what is trained: the wrapper, once there is one
        self.step, self.micro_step, self.mode = 0, 0, "train"
        self.has_gradient = False
        self._calls: Counter[tuple[Any, ...]] = Counter()
        self._repeats: Counter[tuple[Any, ...]] = Counter()

    def install(self) -> None:
        for module in self.paths:
            if type(module).forward is not nn.Module.forward:
                module.register_forward_pre_hook(self._before, with_kwargs=True)
                module.register_forward_hook(self._after, prepend=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        self._calls[module, self.step, self.micro_step, self.mode] += 1
        for name, tensor in leaves(dict(bound.arguments)):
            self._see(module, "input", "grad_input", name, tensor)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        for name, tensor in leaves(output):
            self._see(module, "output", "grad_output", name, tensor)

    def _see(self, module: nn.Module, site: str, gradient_site: str, name: str, tensor: Tensor) -> None:
        call = self._calls[module, self.step, self.micro_step, self.mode] - 1
        path, when = self.paths[module], (self.step, self.micro_step, call, 0, self.mode)
        self.values[site, path, name, *when, "forward"] = tensor.detach().clone()
        if tensor.requires_grad and torch.is_grad_enabled():

            def arrived(gradient: Tensor) -> None:
                key = (gradient_site, path, name, *when, "backward")
                assert key not in self.values
                self.values[key] = gradient.detach().clone()
                handle.remove()

            handle = tensor.register_hook(arrived)

    def tapped(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        self._see(module, "tap", "tap", name, tensor)

    def scalar(self, name: str, value: Tensor) -> None:
        repeat = self._repeats[name, self.step]
        self._repeats[name, self.step] += 1
        self.values["scalar", "", name, self.step, None, 0, repeat, "train", "forward"] = value.detach().clone()

    def _read(self, site: str, path: str, name: str, tensor: Tensor) -> None:
        key = (site, path, name, self.step, None, 0, 0, "train", "optimizer")
        if isinstance(tensor, DTensor):
            self.layouts[key] = {
                "full": tensor.full_tensor().detach().clone(),
                "placements": [(type(p).__name__, getattr(p, "dim", None)) for p in tensor.placements],
                "mesh": list(tensor.device_mesh.shape),
                "mesh_dim_names": list(tensor.device_mesh.mesh_dim_names or ()),
                "coordinate": tensor.device_mesh.get_coordinate(),
            }
            tensor = tensor.to_local()
        self.values[key] = tensor.detach().clone()

    def _read_slices(self, site: str, wrapper: Any, flat: Tensor, suffix: str = "") -> None:
        """A flat tensor of FSDP1, cut by the metadata that FSDP itself uses for checkpoints."""
        parameter = wrapper._handle.flat_param
        for info, shape, shard in zip(
            parameter._param_infos, parameter._shapes, parameter._shard_param_infos, strict=True
        ):
            path, value = self.paths[info.module], flat
            if flat.dim():
                start, count = (shard.offset_in_shard, shard.numel_in_shard) if shard.in_shard else (0, 0)
                value = flat[start : start + count]
                full = self.full[f"{path}.{info.param_name}"] if site == "param" else None
                key = (site, path, info.param_name + suffix, self.step, None, 0, 0, "train", "optimizer")
                self.layouts[key] = {"shape": list(shape), "start": shard.intra_param_start_idx, "full": full}
            self._read(site, path, info.param_name + suffix, value)

    def _flat_parameters(self) -> Iterator[tuple[Any, Any]]:
        for module in self.model.modules():
            handle: Any = getattr(module, "_handle", None)
            if handle is not None:
                yield module, handle.flat_param

    def _read_flat_parameters(self) -> None:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            self.full = {
                f"{path}.{name}": parameter.detach().clone()
                for module, path in self.paths.items()
                for name in ("weight", "bias")
                if isinstance(parameter := getattr(module, name, None), Tensor)
            }
        for wrapper, flat in self._flat_parameters():
            self._read_slices("param", wrapper, flat)
            self._read_slices("grad", wrapper, flat.grad)

    def _read_flat_state(self, optimizer: torch.optim.Optimizer) -> None:
        for wrapper, flat in self._flat_parameters():
            for key, value in optimizer.state.get(flat, {}).items():
                self._read_slices("optim", wrapper, value, f".{key}")
            for parameter, info in zip(flat._params or (), flat._param_infos, strict=False):
                state = optimizer.state.get(parameter, {"exp_avg": torch.empty(0), "exp_avg_sq": torch.empty(0)})
                assert parameter.numel() or "step" not in state
                for key, value in state.items():
                    self._read("optim", self.paths[info.module], f"{info.param_name}.{key}", value)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(self.model, FullyShardedDataParallel):
            self._read_flat_parameters()
        for module, path in self.paths.items():
            for name, parameter in module._parameters.items():
                if parameter is not None and not isinstance(self.model, FullyShardedDataParallel):
                    self._read("param", path, name, parameter)
                    if parameter.grad is not None:
                        self._read("grad", path, name, parameter.grad)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._read("buffer", path, name, buffer)
        self.scalar("lr.AdamW.0", torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64))

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(self.model, FullyShardedDataParallel):
            self._read_flat_state(optimizer)
            return
        for module, path in self.paths.items():
            for name, parameter in module._parameters.items():
                for key, value in optimizer.state.get(parameter, {}).items():
                    self._read("optim", path, f"{name}.{key}", value)


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{name}.{key}" if name else str(key))


class Collectives:
    """Counts what is issued: below Python by the groups' sequence numbers, above it by function and by who calls."""

    KINDS = (
        *("all_", "barrier", "batch_", "broadcast", "gather", "irecv", "isend", "monitored_", "new_", "recv"),
        *("reduce", "scatter", "send", "shrink", "split"),
    )

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.by_recorder: list[str] = []
        for name in dist.distributed_c10d.__all__:
            if name.startswith(self.KINDS):
                wrapped = self._wrap(name, getattr(dist.distributed_c10d, name))
                setattr(dist, name, wrapped)
                setattr(dist.distributed_c10d, name, wrapped)

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            frame = inspect.currentframe()
            while frame is not None:
                is_ours = frame.f_globals.get("__name__", "").split(".")[0] == "recorder"
                # Every backward passes this function, which hands on to torch; what it does itself is in others.
                if is_ours and frame.f_code.co_qualname != "LossFinder._looking.<locals>.run":
                    self.by_recorder.append(f"{name} from {frame.f_code.co_qualname}")
                frame = frame.f_back
            return function(*args, **kwargs)

        return wrapped

    def result(self) -> dict[str, Any]:
        groups = list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []
        backends: list[Any] = [group._get_backend(torch.device("cpu")) for group in groups]
        numbers = [backend._get_sequence_number_for_group() for backend in backends]
        return {"calls": dict(self.calls), "by_recorder": self.by_recorder, "sequence_numbers": numbers}


def shard_flat(model: Net, *, use_orig_params: bool, mixed: bool) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

    options: dict[str, Any] = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    if mixed:
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    strategies = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
    for i, strategy in enumerate(strategies):
        model.blocks[i] = FullyShardedDataParallel(model.blocks[i], sharding_strategy=strategy, **options)
    return FullyShardedDataParallel(model, **options)


def wrap(model: Net, layout: str, *, mixed: bool) -> nn.Module:
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout.startswith("fsdp1"):
        return shard_flat(model, use_orig_params=layout == "fsdp1 orig", mixed=mixed)
    if layout == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if mixed else MixedPrecisionPolicy()
        for block, reshard in zip(model.blocks, (True, False), strict=True):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model
    if layout == "compile":
        return torch.compile(model, backend="eager")  # type: ignore[return-value]
    if layout == "checkpoint":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
    return model


@contextlib.contextmanager
def accumulating(model: nn.Module, is_last: bool) -> Iterator[None]:
    """Each layout's word for `do not reduce yet`."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, FullyShardedDataParallel)) and not is_last:
        with model.no_sync():
            yield
    else:
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        yield


def make_batch() -> tuple[dict[str, Any], Tensor, Tensor]:
    shift, gain = random.random(), float(np.random.rand())
    batch = {"features": torch.randn(4, WIDTH) + shift, "more": [torch.randn(WIDTH)]}
    return batch, torch.tensor(gain), torch.randn(4, 1)


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def no_tap(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    return tensor


tap: Callable[[nn.Module, str, Tensor], Tensor] = no_tap


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="plain", choices=LAYOUTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--watch", action="store_true")
    parser.add_argument("--mixed", action="store_true", help="bfloat16 compute")
    parser.add_argument("--tap", action="store_true", help="import recorder; record taps and the loss")
    parser.add_argument("--stall", action="store_true", help="the writer reads nothing before training is over")
    parser.add_argument("--fail-hooks-on-rank", type=int, default=-1)
    return parser.parse_args()


def stall_writer() -> threading.Event:
    from recorder.capture.staging import measure

    gate, real = threading.Event(), measure.measure

    def stalled(*args: Any) -> Any:
        gate.wait()
        return real(*args)

    measure.measure = stalled  # type: ignore[assignment]
    return gate


def fail_hooks() -> None:
    from recorder.capture.core import Capture

    def fail(self: Capture, *args: Any, **kwargs: Any) -> None:
        raise MemoryError("on purpose")

    Capture.observe = fail  # type: ignore[method-assign]


def main() -> None:
    options = arguments()
    is_distributed = options.layout.startswith(("ddp", "fsdp"))
    collectives = Collectives()
    if is_distributed:
        dist.init_process_group("gloo")
    run(options, collectives, dist.get_rank() if is_distributed else 0)
    if is_distributed:
        gc.collect()  # DDP that outlives its process group can block the end of the process
        dist.destroy_process_group()


def run(options: argparse.Namespace, collectives: Collectives, rank: int) -> None:
    global tap
    if options.fail_hooks_on_rank == rank:
        fail_hooks()
    gate = stall_writer() if options.stall else None

    torch.manual_seed(7)
    net = Net()
    watch = Watch(net) if options.watch else None
    model = wrap(net, options.layout, mixed=options.mixed)
    if watch is not None:
        watch.model = model
        watch.install()
    if options.tap:
        import recorder

        def tap(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
            if watch is not None:
                watch.tapped(module, name, tensor)
            return recorder.tap(name, tensor)

    torch.manual_seed(100 + rank)
    np.random.seed(200 + rank)
    random.seed(300 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses: list[Tensor] = []
    began = time.perf_counter()
    for step in range(options.steps):
        if watch is not None:
            watch.step, watch.mode = step, "train"
        for micro_step in range(MICRO_BATCHES):
            if watch is not None:
                watch.micro_step = micro_step
            batch, gain, target = make_batch()
            with accumulating(model, micro_step == MICRO_BATCHES - 1):
                output = model(batch, gain=gain)
                loss = (output["prediction"].float() - target).square().mean() / MICRO_BATCHES
                loss.backward()
            losses.append(loss.detach().clone())
            if options.tap:
                recorder.scalar("loss", loss)
            if watch is not None:
                watch.scalar("loss", loss)  # which the recorder finds where it is not given
        if isinstance(model, FullyShardedDataParallel):
            model.clip_grad_norm_(1.0)
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if watch is not None:
                watch.scalar("clip.norm", norm.full_tensor() if isinstance(norm, DTensor) else norm)
                watch.scalar("clip.max_norm", torch.tensor(1.0, dtype=torch.float64))
        if watch is not None:
            watch.before_step(optimizer)
        optimizer.step()
        if watch is not None:
            watch.after_step(optimizer)
        optimizer.zero_grad(set_to_none=step % 2 == 1)
        schedule.step()

        if watch is not None:
            watch.micro_step, watch.mode = 0, "no_grad"
        batch, gain, target = make_batch()
        model.eval()
        with torch.no_grad():
            if options.layout != "ddp":
                losses.append((model(batch, gain=gain)["prediction"].float() - target).square().mean())
            elif rank == 0:  # as many scripts do
                losses.append((net(batch, gain=gain)["prediction"].float() - target).square().mean())
        model.train()

    seconds = time.perf_counter() - began
    if gate is not None:
        gate.set()
    options.out.mkdir(parents=True, exist_ok=True)
    saved = {
        "losses": torch.stack(losses),
        "params": {name: local(p) for name, p in model.named_parameters()},
        "buffers": {name: local(b) for name, b in net.named_buffers()},
        "rng": {
            "torch": torch.get_rng_state(),
            "numpy": pickle.dumps(np.random.get_state()),
            "python": random.getstate(),
        },
        "collectives": collectives.result(),
        "seconds": seconds,
        "recorder_is_loaded": "recorder" in sys.modules,
        "values": watch.values if watch is not None else {},
        "layouts": watch.layouts if watch is not None else {},
    }
    torch.save(saved, options.out / f"rank{rank}.pt")


if __name__ == "__main__":
    main()
