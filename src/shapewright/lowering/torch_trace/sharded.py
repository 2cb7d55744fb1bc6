"""Modules that PyTorch's FSDP2 (``fully_shard``) shards, as one rank runs them.

Nothing is sent. Each module that ``fully_shard`` wrapped runs with complete weights on the meta device, in the format
that its mixed-precision policy computes in, while the rank's part of them is what memory counts. FSDP's hooks are
replaced by ours, which record its collectives and hold buffers as it does: weights of the running module and of the one
gathered before it, all weights of the root, and the complete gradients of a module until they are reduced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.torch_trace.inputs import local
from shapewright.lowering.torch_trace.recorder import Call
from shapewright.lowering.torch_trace.storages import GRADIENTS, WORKSPACE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shapewright.lowering.torch_trace.recorder import Recorder

# Gathered modules that exist at a time, besides the root: the running one and the next, which is gathered meanwhile.
_GATHERED = 2
_PREFIX = "FSDP"


class Shards:
    """Parameters of a module that FSDP2 shards, by identity."""

    def __init__(self, module: Any) -> None:
        """Find them; none where no part of the module is wrapped."""
        self.groups: list[_Group] = []
        self._managed: dict[int, tuple[_Group, Any]] = {}
        self._parts: dict[int, Any] = {}  # by identity of the tensors that stand in for them
        for each in module.modules():
            state = _state_of(each)
            # Older releases have one group, without the plural.
            for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
                if group is None or any(group is known.source for known in self.groups):
                    continue
                own = _Group(group, each, state, is_root=each is module)
                self.groups.append(own)
                self._managed |= {id(one.sharded_param): (own, one) for one in group.fsdp_params}

    @property
    def num_replicas(self) -> int:
        """Ranks with inputs of their own."""
        return max((group.num_shards * group.num_replicas for group in self.groups), default=1)

    def complete(self, parameter: Any, float_type: Any) -> Any | None:
        """Meta tensor of all of a sharded parameter, as it computes; None for other tensors."""
        import torch

        if id(parameter) not in self._managed:
            return None
        group, managed = self._managed[id(parameter)]
        policy = group.source.mp_policy.param_dtype
        dtype = float_type or policy or parameter.dtype
        if not parameter.is_floating_point():
            dtype = parameter.dtype
        whole = torch.empty(managed._orig_size, dtype=dtype, device="meta")
        spec = getattr(managed, "_unsharded_dtensor_spec", None) or getattr(managed, "_tp_spec", None)
        if spec is not None:
            whole = torch.distributed.tensor.DTensor.from_local(whole, spec.mesh, spec.placements, run_check=False)
        made = torch.nn.Parameter(whole, requires_grad=parameter.requires_grad)
        # The optimizer keeps the format of the module, unless the trace has another one.
        stored = float_type if float_type is not None and parameter.is_floating_point() else parameter.dtype
        self._parts[id(made)] = torch.empty_like(local(parameter), dtype=stored, device="meta")
        group.members.append(made)
        return made

    def shard_of(self, tensor: Any) -> Any:
        """The rank's part of a tensor, whose format is that of the optimizer; other tensors as they are."""
        return self._parts.get(id(tensor), local(tensor))

    @contextmanager
    def running(self, recorder: Recorder, paths: Mapping[int, str]) -> Iterator[None]:
        """Replace FSDP's hooks by ours while the module runs."""
        for tensor in (one for group in self.groups for one in group.members):
            storage = recorder.storages.storages[recorder.storages.serial_of(local(tensor))]
            part = self.shard_of(tensor)
            storage.num_bytes = part.numel() * part.element_size()
        replaced = []
        run = _Run(recorder, self.shard_of)
        if self.groups:
            ranks = max(group.num_shards for group in self.groups)
            recorder.notes[
                f"fully_shard over {ranks} ranks: time and memory are those of one rank, which takes the given inputs"
            ] = None
        for group in self.groups:
            group.path = paths.get(id(group.module), "")
            for member in group.members:
                if member.requires_grad:
                    member.register_post_accumulate_grad_hook(lambda one, own=group: run.reduce(own, one))
            for hooks, own_hook in (
                (group.module._forward_pre_hooks, run.before(group)),
                (group.module._forward_hooks, run.after(group)),
            ):
                for key, hook in hooks.items():
                    if getattr(hook, "__self__", None) is group.state:
                        replaced.append((hooks, key, hook))
                        hooks[key] = own_hook
        try:
            yield
            run.finish(self.groups)
        finally:
            for hooks, key, hook in replaced:
                hooks[key] = hook


def _state_of(module: Any) -> Any:
    get = getattr(module, "_get_fsdp_state", None)
    return get() if callable(get) else None


def class_name(module: Any) -> str:
    """Name of a module's class; ``fully_shard`` puts its own in front."""
    name = type(module).__name__
    return name.removeprefix(_PREFIX) if _state_of(module) is not None else name


class _Group:
    """Parameters that are gathered together."""

    def __init__(self, source: Any, module: Any, state: Any, *, is_root: bool) -> None:
        self.source, self.module, self.state = source, module, state
        self.members: list[Any] = []
        self.reduced: list[Any] = []
        self.path = ""
        mesh = source.mesh_info
        self.num_shards = int(getattr(mesh, "shard_mesh_size", 1))
        self.num_replicas = int(getattr(mesh, "replicate_mesh_size", 1))
        later = source.post_forward_mesh_info
        # The root's weights would be gathered again at once.
        is_kept = later is None or (is_root and bool(getattr(state, "_auto_reshard_after_forward", True)))
        self.num_shards_backward = 1 if is_kept else int(getattr(later, "shard_mesh_size", 1))
        self.gathered_pass = ""

    @property
    def num_bytes(self) -> float:
        """Gathered weights. [byte]"""
        return float(sum(local(one).numel() * local(one).element_size() for one in self.members))


class _Run:
    """What FSDP holds and sends during one step."""

    def __init__(self, recorder: Recorder, part_of: Callable[[Any], Any]) -> None:
        self.recorder = recorder
        self._part_of = part_of
        self._held: deque[Any] = deque(maxlen=_GATHERED)
        self._kept: list[Any] = []

    def before(self, group: _Group) -> Any:
        """Hook before the forward pass of a module: gather, and cast its inputs."""

        def hook(_: Any, args: Any, kwargs: Any) -> Any:
            self.gather(group)
            return group.state._cast_forward_inputs(args, kwargs)

        return hook

    def after(self, group: _Group) -> Any:
        """Hook after it: gather again once the gradient of an output arrives."""
        from torch.utils._pytree import tree_leaves

        def hook(_: Any, __: Any, output: Any) -> Any:
            output = group.state._cast_output_dtype(output)
            for one in tree_leaves(output):
                if getattr(one, "requires_grad", False):
                    one.register_hook(lambda _: self.gather(group))
            return output

        return hook

    def gather(self, group: _Group) -> None:
        """Gather the weights of a group, once in each pass."""
        pass_name = "backward" if self.recorder.in_backward else "forward"
        if group.gathered_pass == pass_name or not group.members:
            return
        ranks = group.num_shards if not group.gathered_pass else group.num_shards_backward
        group.gathered_pass = pass_name
        if ranks == 1:
            return
        self._send("all_gather", group, pass_name, group.num_bytes, ranks)
        buffer = self._buffer(group.num_bytes, group.path, WORKSPACE)
        if group.num_shards_backward == 1:
            self._kept.append(buffer)
        else:
            self._held.append(buffer)

    def reduce(self, group: _Group, parameter: Any) -> None:
        """Reduce the gradients of a group when the last one exists; each rank keeps its part."""
        group.reduced.append(parameter)
        if len(group.reduced) == sum(one.requires_grad for one in group.members):
            self._reduce(group)

    def finish(self, groups: list[_Group]) -> None:
        """Reduce the gradients of groups with parameters that no gradient reached."""
        for group in groups:
            self._reduce(group)
        self._held.clear()
        self._kept.clear()

    def _reduce(self, group: _Group) -> None:
        if not group.reduced:
            return
        wide = group.source.mp_policy.reduce_dtype
        num_bytes = float(sum(local(one).numel() * (wide or one.dtype).itemsize for one in group.reduced))
        if group.num_shards > 1:
            self._send("reduce_scatter", group, "backward", num_bytes, group.num_shards)
        if group.num_replicas > 1:
            self._send("all_reduce", group, "backward", num_bytes / group.num_shards, group.num_replicas, apart=True)
        parts = [self._part_of(one) for one in group.reduced]
        kept_bytes = float(sum(part.numel() * part.element_size() for part in parts))
        self._kept.append(self._buffer(kept_bytes, group.path, GRADIENTS))
        for one in group.reduced:
            one.grad = None
        group.reduced.clear()

    def _send(
        self, name: str, group: _Group, pass_name: str, num_bytes: float, num_ranks: int, *, apart: bool = False
    ) -> None:
        """Record a collective; replicas of shards are on nodes of their own."""
        work = Collective(
            name="",
            op_name=name,
            axis="data",
            message_bytes=num_bytes,
            num_ranks=num_ranks,
            ranks_per_node=1 if apart else num_ranks,
            overlaps=True,
        )
        gradient = "backward" if pass_name == "backward" else ""
        self.recorder.calls.append(Call(name, group.path, pass_name, gradient, work))

    def _buffer(self, num_bytes: float, path: str, category: str) -> Any:
        import torch

        buffer = torch.empty(int(num_bytes), dtype=torch.uint8, device="meta")
        storage = self.recorder.storages.storages[self.recorder.storages.serial_of(buffer)]
        storage.category, storage.path = category, path
        return buffer
