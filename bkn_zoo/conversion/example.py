"""The example inputs of a conversion: given by the caller, or created to fit the first layer."""

import copy
import functools
import inspect
import itertools
import random
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.conv import _ConvNd

from bkn_zoo.conversion.plan import ConversionPlan, plan_conversion
from bkn_zoo.conversion.record import count_images, images_in
from bkn_zoo.errors import ConversionError
from bkn_zoo.torch_internals import tree_map

SIZES = {1: ((64,), (1024,), (16000,)), 2: ((64, 64), (224, 224), (299, 299), (8, 8)), 3: ((8, 64, 64), (32, 64, 64))}
"""Sizes of created images, by the dimensions of the first convolution. The first accepted size is used."""

FRAMES, TOKENS = 8, 7
"""Sizes of created videos and sequences."""

REASON = 150
"""Characters at the beginning and at the end of another error that ours quote."""


class Inputs(NamedTuple):
    """The arguments of a call of a network."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012, never changed


def inputs_of(example: Any) -> Inputs:
    """The arguments for an example: a tuple of inputs, a dict of named inputs, or a single input."""
    if isinstance(example, tuple):
        return Inputs(example)
    # A Hugging Face processor returns a mapping that is not a dict.
    if isinstance(example, dict) or hasattr(example, "keys"):
        return Inputs((), dict(example))
    return Inputs((example,))


def plans_for(
    model: nn.Module, norms: list[str], example: Inputs | None, images: str | int | None
) -> dict[bool, ConversionPlan]:
    """Plans for training and evaluation. One is missing if the network accepts the example in one mode only."""
    if example is None:
        tried = [(inputs, meta) for meta in (True, False) for inputs in made_up(model, quick=meta)]
    else:
        tried = [(example, False)]
        if count_images(images_in(model.forward, images, *example)) == 1:
            # Twice, to distinguish an image from a batch.
            tried.insert(0, (tree_map(_twice, example, is_leaf=_is_single_list), False))
    plans: dict[bool, ConversionPlan] = {}
    errors = []
    with unchanged_caches(model):
        for training, (inputs, meta), hooks in itertools.product((True, False), tried, (False, True)):
            if training in plans or (hooks and not _functions_of_hooks(model)):
                continue
            try:
                with left_alone(), torch.device("meta") if meta else torch.enable_grad():
                    twin, args = _copies(model, inputs, training, meta, hooks)
                    count = count_images(images_in(model.forward, images, *args)) or 0
                    plans[training] = plan_conversion(twin, {n: twin.get_submodule(n) for n in norms}, args, count)
            except Exception as error:  # a network may raise any error for unexpected inputs
                errors.append((error, inputs))
    if not plans:
        raise _refused_example(model, *errors[0 if example is None else -1], example is not None) from errors[0][0]
    return plans


def _copies(model: nn.Module, inputs: Inputs, training: bool, meta: bool, hooks: bool) -> tuple[nn.Module, Inputs]:
    """A network and inputs for the planner, on the meta device if requested."""
    replaced: dict[int, Any] = {}
    if meta:
        replaced = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
        replaced |= {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    twin = copy.deepcopy(model, replaced)
    twin.train(training)
    if not hooks:
        # A copy has the same functions as hooks, which belong to the caller. Other hooks were copied.
        for place, number in _functions_of_hooks(twin):
            del place[number]
    device = "meta" if meta else None
    return twin, Inputs(*tree_map(lambda x: x.to(device=device, copy=True) if isinstance(x, Tensor) else x, inputs))


def _functions_of_hooks(model: nn.Module) -> list[tuple[dict[int, Any], int]]:
    """Hooks of a network that are plain functions."""
    places = [place for module in model.modules() for place in (module._forward_hooks, module._forward_pre_hooks)]
    return [(place, number) for place in places for number in place if inspect.isfunction(place[number])]


@contextmanager
def unchanged_caches(model: nn.Module) -> Iterator[None]:
    """Clear caches (`functools.lru_cache`) beside the classes of a network that receive tensors of the planner."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    places = [vars(place) for place in {*kinds, *(sys.modules.get(kind.__module__) for kind in kinds)} if place]
    caches = {value for place in places for value in place.values() if isinstance(value, functools._lru_cache_wrapper)}
    before = {cache: cache.cache_info().currsize for cache in caches}
    try:
        yield
    finally:
        for cache, size in before.items():
            if cache.cache_info().currsize > size:
                cache.cache_clear()


@contextmanager
def left_alone() -> Iterator[None]:
    """Run foreign code: warnings are ignored, and the states of random generators are restored."""
    python, numpy = random.getstate(), np.random.get_state()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it is a single operation, which cannot be analysed
    try:
        # Attention in several operations, which the planner can follow.
        with sdpa_kernel(SDPBackend.MATH), torch.random.fork_rng(), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        random.setstate(python)
        np.random.set_state(numpy)


def _is_single_list(x: Any) -> bool:
    return isinstance(x, list) and len(x) == 1


def _twice(x: Any) -> Any:
    if _is_single_list(x):
        return x * 2
    return torch.cat([x, x]) if isinstance(x, Tensor) and x.ndim > 0 and x.shape[0] == 1 else x


def made_up(model: nn.Module, quick: bool) -> Iterator[Inputs]:
    """Inputs that fit the first layer of a network; large ones only if they are `quick`, as on the meta device."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    parameters = inspect.signature(model.forward).parameters.values()
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.default is p.empty and p.kind in places]
    for shape in _shapes(model, quick):
        yield Inputs((torch.zeros(shape, dtype=like.dtype, device=like.device),) * max(len(needed), 1))


def _shapes(model: nn.Module, quick: bool) -> Iterator[tuple[int, ...]]:
    layers = (module for module in model.modules() if isinstance(module, _ConvNd | nn.Linear | nn.RNNBase))
    first = next(layers, None)
    if isinstance(first, nn.Linear | nn.RNNBase):
        features = first.in_features if isinstance(first, nn.Linear) else first.input_size
        yield from ((2, TOKENS, features), (2, features))
        return
    channels, dims = (3, 2) if first is None else (first.in_channels, len(first.kernel_size))
    # Of timm, and of Hugging Face.
    about, config = getattr(model, "pretrained_cfg", None), getattr(model, "config", None)
    known = about.get("input_size") if about is not None and hasattr(about, "get") else None
    size = known[-1] if known else getattr(config, "image_size", None)
    sizes = [*SIZES[dims][:1], *([(size,) * dims] if isinstance(size, int) else [])]
    sizes += SIZES[dims][1:] if quick else ()
    channels = getattr(config, "num_channels", channels)
    stated = known[0] if known else 3  # for a network that first moves pixels into channels
    for count in dict.fromkeys((channels, stated)):
        yield from ((2, count, *each) for each in sizes)
    if dims == 2:
        yield (2, FRAMES, channels, *sizes[0])


def _refused_example(model: nn.Module, error: Exception, inputs: Inputs, given: bool) -> ConversionError:
    kind, line, why = type(model).__name__, _line_of(error), reason_of(error)
    if given and _accepts(model, inputs):
        return ConversionError(
            f"{kind} accepts the example, but the conversion cannot follow it at {line} ({why}): convert parts of it "
            "with only=NAME, and please report it."
        )
    if given:
        return ConversionError(f"{kind} does not accept the example and fails at {line} ({why}): correct the example.")
    return ConversionError(
        f"{kind} does not accept inputs created for its first layer, such as {tuple(inputs.args[0].shape)}, and fails "
        f"at {line} ({why}): pass valid inputs, convert(model, example=inputs), several as a tuple or a dict."
    )


def _line_of(error: Exception) -> str:
    """The innermost line outside PyTorch and this package."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if "/torch/" not in f.filename and "/bkn_zoo/conversion/" not in f.filename]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}, `{theirs[-1].line}`" if theirs else "its forward"


def _accepts(model: nn.Module, inputs: Inputs) -> bool:
    """Whether a network runs on these inputs, in training or evaluation mode."""
    for training in (True, False):
        with left_alone(), torch.no_grad(), suppress(Exception):
            twin, copies = _copies(model, inputs, training, meta=False, hooks=True)
            twin(*copies.args, **copies.kwargs)
            return True
    return False


def reason_of(error: Exception) -> str:
    """The text of a foreign error in one line, without the middle of a long one: reasons are at the ends."""
    text = " ".join(str(error).split()).rstrip(".").replace(". ", "; ") or type(error).__name__
    return text if len(text) <= 2 * REASON else f"{text[:REASON]} ... {text[-REASON:]}"
