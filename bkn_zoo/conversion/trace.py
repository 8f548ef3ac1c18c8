"""A network as a torch.fx graph in which every batch norm, and every module that holds none, is a single node."""

import inspect
import math
import operator
import random
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from bkn_zoo.errors import ConversionError

UNNAMED = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
"""Arguments of which a signature does not say how many there are, and how they are written."""


def is_batchnorm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm)


def holds_batchnorm(module: nn.Module) -> bool:
    return any(map(is_batchnorm, module.modules()))


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    """`operator.iadd` and the like; of those themselves fx makes statements, which would change plain numbers too."""
    operation = getattr(operator, name)

    def change(x: Any, other: Any) -> Any:
        return operation(x, other)

    change.__name__ = change.__qualname__ = name
    return change


IN_PLACE = [
    _in_place(name)
    for name in (
        "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift", "irshift",
    )
]  # fmt: skip


class Value(fx.Proxy):
    """What `+=` and the like change in place, under all of its names: for fx they make another."""

    @property
    def data(self) -> Any:
        return self.tracer.create_proxy("call_function", getattr, (self, "data"), {})

    @data.setter
    def data(self, value: Any) -> None:
        same = isinstance(value, fx.Proxy) and value.node.target in IN_PLACE
        if not same and not isinstance(self.tracer, LayerTracer):
            raise TypeError("another tensor is put in the place of a tensor's data, which a traced network forgets")


for function in IN_PLACE:

    def method(self: Value, other: Any, function: Callable[[Any, Any], Any] = function) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    setattr(Value, f"__{function.__name__}__", method)


class Kept(Value):
    """A parameter or buffer, which is read when the network runs; only its shape may be looked at before."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, tensor: Tensor) -> None:
        super().__init__(node, tracer)
        self.tensor = tensor

    def __getattr__(self, k: str) -> Any:
        shape = k in ("shape", "size", "dim", "ndim", "numel", "nelement")
        return getattr(self.tensor, k) if shape else super().__getattr__(k)

    def __len__(self) -> int:
        return len(self.tensor)


class Tracer(fx.Tracer):
    """Traces through modules that hold a batch norm. Arguments with a default keep it, and are no inputs.

    What is passed as `*args` or `**kwargs` is not known, and taken to be nothing.
    """

    def __init__(self) -> None:
        super().__init__(autowrap_modules=(math,))
        self.autocasts = _autocasts()

    def proxy(self, node: fx.Node) -> Value:
        return Value(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """Buffers are nodes, as parameters are: what a forward makes of one would be a constant otherwise."""
        if isinstance(attr_val, Tensor):
            for name, tensor in (*self.root.named_parameters(), *self.root.named_buffers()):
                if tensor is attr_val:
                    if name not in parameter_proxy_cache:
                        parameter_proxy_cache[name] = self.create_proxy(
                            "get_attr", name, (), {}, proxy_factory_fn=lambda node: Kept(node, self, attr_val)
                        )
                    return parameter_proxy_cache[name]
        return attr_val

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "gradients are switched off there, by torch.no_grad or a reentrant checkpoint, which a traced network "
                "forgets, unlike .detach()"
            )
        if _autocasts() != self.autocasts:
            raise RuntimeError(
                "autocast is switched there, which a traced network forgets except in modules that hold no batch norm"
            )
        return super().create_node(*args, **kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_batchnorm(m) or not holds_batchnorm(m)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        parameters = list(inspect.signature(root_fn).parameters.values())[1:]
        needed = [p for p in parameters if p.default is p.empty and p.kind not in UNNAMED]
        inputs = {p.name: self.create_proxy("placeholder", p.name, (), {}) for p in needed}
        named = {p.name: inputs.pop(p.name) for p in needed if p.kind is p.KEYWORD_ONLY}
        return lambda *args: root_fn(*args, **named), [self.root, *inputs.values()]


class LayerTracer(Tracer):
    """Traces through all but PyTorch's own layers: for a look into a module that is one node of the network's graph.

    Args:
        given: the arguments of the call, positional and named.
        kinds: of those that are inputs of the graph, in lists and dicts too, in the order of `tree_leaves`; the rest is
            taken as it is.
    """

    def __init__(self, given: tuple[Any, Any], kinds: tuple[type, ...]) -> None:
        super().__init__()
        self.given, self.kinds = given, kinds

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        def stand_in(leaf: Any) -> Any:
            return self.create_proxy("placeholder", "given", (), {}) if isinstance(leaf, self.kinds) else leaf

        args, kwargs = tree_map(stand_in, self.given)
        return lambda root: root_fn(root, *args, **kwargs), [self.root]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).__module__.startswith("torch.nn.") and not isinstance(m, nn.Sequential)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        return fx.Tracer.create_node(self, *args, **kwargs)  # it is run as it is, and forgets nothing


def trace(model: nn.Module, part: str = "") -> fx.Graph:
    """The graph of `model` in the mode, training or evaluation, that it is in.

    Args:
        part: what it is called, if it is a part of a network.
    """
    if is_batchnorm(model):
        raise ConversionError(f"{type(model).__name__} is a batch norm itself: convert a network that it is part of.")
    if "forward" in vars(model):
        raise ConversionError(f"the forward of this {type(model).__name__} was replaced by another: put it in a class.")
    generators = _generators(model)
    states, own = _random_states(), list(map(_state, generators))
    plain = _plain_tensors(model)
    try:
        with torch.enable_grad():
            graph = Tracer().trace(model)
    except Exception as error:  # tracing runs the model's own code on stand-ins, which can fail in any way
        hint = part_hint(model, part)
        hint = f", or convert {hint}" if hint else ""
        parameters = inspect.signature(type(model).forward).parameters.values()
        unnamed = " and ".join(UNNAMED[p.kind] + p.name for p in parameters if p.kind in UNNAMED)
        unnamed = f", name the inputs that it takes from {unnamed}, which are empty here" if unnamed else ""
        raise ConversionError(
            f"{type(model).__name__} cannot be traced at {_line_of(error)} ({first_sentence(error)}): write that line "
            f"without it{unnamed}{hint}."
        ) from error
    finally:
        drawn = not _same(states, _random_states())
        if drawn:
            _set_random_states(states)
    if drawn or not _same(own, list(map(_state, generators))):
        raise ConversionError(
            f"{type(model).__name__} draws random numbers in its forward outside of a module, and would keep those of "
            "now for good: draw them in a module of its own that holds no batch norm, such as torchvision's "
            "StochasticDepth or timm's DropPath."
        )
    for name in _assigned_buffers(model):
        raise ConversionError(
            f"{type(model).__name__} puts another tensor in the place of its buffer {name} in its forward, which would "
            "be forgotten: change the one that is there, by copy_ or +=."
        )
    for name, (version, tensor) in plain.items():
        if tensor._version != version:
            raise ConversionError(
                f"{type(model).__name__} changes its tensor {name} in its forward, and would keep that of now for "
                "good: make it a buffer, by register_buffer."
            )
    return graph


def _assigned_buffers(model: nn.Module) -> list[str]:
    """Those of a traced model that are not what they were, nor what was made of that in place, or moved."""
    found = []
    for path, module in model.named_modules():
        for name, value in module._buffers.items():
            node = value.node if isinstance(value, fx.Proxy) else None
            while node and (node.target in IN_PLACE or (node.op == "call_method" and _keeps(str(node.target)))):
                node = cast(fx.Node, node.args[0])
            if node and node.op != "get_attr":
                found.append(f"{path}.{name}".lstrip("."))
    return found


def _keeps(method: str) -> bool:
    """Whether a method gives the tensor that it is called on, or that elsewhere."""
    return method[-1] == "_" or method in ("to", "type_as")


def _plain_tensors(model: nn.Module) -> dict[str, tuple[int, Tensor]]:
    """Attributes of modules that are neither parameters nor buffers, with how often each has changed."""
    return {
        f"{path}.{name}".lstrip("."): (value._version, value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and not value.is_inference()
    }


def part_hint(model: nn.Module, part: str) -> str:
    """How to convert less of a network, which is a part of this name or the whole; nothing if there is no less."""
    parts = [name for name, child in model.named_children() if holds_batchnorm(child) and not is_batchnorm(child)]
    return f"a part of the network with only=NAME, such as only={f'{part}.{parts[0]}'.lstrip('.')!r}" if parts else ""


def _autocasts() -> int:
    """How many autocasts we are in; one with enabled=False counts, although it may change nothing right now."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _random_states() -> tuple[Any, ...]:
    """Of all generators that a forward may draw from without having one of its own."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def _generators(model: nn.Module) -> list[Any]:
    """Those that its modules have as attributes."""
    kinds = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, kinds)]


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def _set_random_states(states: tuple[Any, ...]) -> None:
    python, numpy, cpu, cuda = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


def _same(states: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(map(np.array_equal, tree_leaves(states), tree_leaves(others)))


def _line_of(error: Exception) -> str:
    """The innermost line that is neither PyTorch's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if "/torch/" not in frame.filename and frame.filename != __file__]
    if not theirs:
        return "its forward"
    frame = theirs[-1]
    return f"{frame.filename}:{frame.lineno}, `{frame.line}`"


def first_sentence(error: Exception) -> str:
    """What an error of others says, which may go on with advice of its own."""
    return re.split(r"\.\s|\n", str(error).strip())[0].rstrip(".") or type(error).__name__
