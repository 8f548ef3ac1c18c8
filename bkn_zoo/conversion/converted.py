"""Converts a network with batch normalization to BKN. It keeps its weights, names and code."""

import copy
import functools
import inspect
import sys
import types
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from bkn_zoo.conversion.example import Inputs, inputs_of, left_alone, plans_for, reason_of
from bkn_zoo.conversion.learning import LEARNING_GAIN, start_near_population
from bkn_zoo.conversion.plan import INTERLEAVED, NEVER_CALLED, UNFIT, ConversionPlan, NormCall
from bkn_zoo.conversion.record import CALLS, run_with_record
from bkn_zoo.conversion.replace import linked_norms, posing_as_batchnorms, replace_norms
from bkn_zoo.conversion.report import NormRow, Report
from bkn_zoo.errors import ConversionError, UnknownNameError, few_names
from bkn_zoo.kernels.conditions import observed_by_pytorch
from bkn_zoo.models.network import BeliefNetwork, Network
from bkn_zoo.modes import Statistics, choose_statistics
from bkn_zoo.norms.batch_kalman import BATCHNORM_GAIN, INITIAL_GAIN, BatchKalmanNorm, check_gain, no_weight_decay
from bkn_zoo.norms.standardized import standardize_convolutions, standardized_once
from bkn_zoo.torch_internals import AnyBatchNorm, tree_leaves, tree_map

CHILDREN = {"children", "named_children", "modules", "named_modules", "_modules", "getattr", "get_submodule"}
"""A method that uses one of these may run any child."""

WRAPPERS = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Wrappers of PyTorch, and the attribute with the network inside. The last one is that of torch.compile."""

OWN_NAMES = ("report", "foldable", "statistics_batch_size", "default_statistics")
"""Attributes of a converted network, whose names the original must not use."""

BATCHNORMS = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "_BatchNorm", "_NormBase"}


class Converted(BeliefNetwork):
    """A network from `convert`, with a `report`. Its class is a subclass of the original's class and of this one."""

    _original: type[nn.Module]  # the class of the network before its conversion
    _looked = False  # whether it was checked that the network was trained after its conversion
    _told = False  # whether removed norms were reported
    _norms: tuple[str, ...] = ()  # the names of the converted norms
    _images: str | int | None = None  # the input that contains the images
    _methods: tuple[str, ...] = ()  # methods of the original, besides `forward`, that run norms
    report: Report
    foldable = types.MappingProxyType({})

    def __init_subclass__(cls, **options: Any) -> None:
        """Skip that of the original, which may register the class or need arguments."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "default_statistics":
            for norm in linked_norms(self):
                norm.link.default = value

    def train(self, mode: bool = True) -> Any:
        with posing_as_batchnorms(self):  # a `train` of the original may freeze norms
            return super().train(mode)

    # These two show norms as batch norms to functions that look for them. Otherwise, PyTorch's update_bn would do
    # nothing, and timm's reparameterize_model fail.
    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with posing_as_batchnorms(self) if _caller() == "update_bn" else nullcontext():
            yield from super().named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[Any]:
        with posing_as_batchnorms(self) if _caller() == "reparameterize_model.<locals>._fuse" else nullcontext():
            yield from super().named_children()

    def forward(self, *args: Any, statistics: str | None = None, **kwargs: Any) -> Any:
        """Call the original network with "population", "sample" or "expected" statistics; at inference only."""
        chosen = self._choose(statistics, (args, kwargs))
        once = self.standardized_weights and not torch.compiler.is_compiling()
        with standardized_once(self) if once else nullcontext():
            return run_with_record(self, chosen, self._original.forward, args, kwargs)

    def _choose(self, statistics: str | None, inputs: Any) -> Statistics:
        chosen = choose_statistics(self.training, statistics, self.statistics_batch_size, self.default_statistics)
        if not self.training and any(isinstance(x, Tensor) and x.shape[:1] == (0,) for x in tree_leaves(inputs)):
            return Statistics("population")  # an empty batch has no statistics and needs none
        if chosen.mode in ("sample", "expected") and not self._looked:
            self._warn_if_untrained(chosen.mode)
        return chosen

    def _warn_if_untrained(self, mode: str) -> None:
        """Warn once that a pretrained network must be trained before it uses the statistics of an image."""
        norms = linked_norms(self)
        if torch.compiler.is_compiling() or any(observed_by_pytorch(norm.running_var) for norm in norms):
            return
        self._looked = True
        linked = [norm for norm in norms if norm.prior_features is not None]
        trained = any(norm.center is not None or any(b.any() for b in norm.transition_blocks) for norm in linked)
        if not trained and any((norm.running_var != 1).any() for norm in norms):
            message = (
                f"statistics={mode!r} destroys the accuracy of a pretrained network that was converted but not "
                "trained: train it first, for example for a few epochs after "
                "bkn_zoo.conversion.start_near_population, or choose statistics='population'."
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def no_weight_decay(self) -> set[str]:
        """Names of A, R and q, to exclude them from weight decay, in the form that timm expects."""
        others = getattr(self._original, "no_weight_decay", None)
        return no_weight_decay(self) | set(others(self) if others else ())

    def _get_name(self) -> str:
        return f"Converted{self._original.__name__}"

    # For copies and pickles, which cannot import a class that is created here.
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (type(self).__mro__[1], self._original, self._methods), self.__getstate__()


def _caller() -> str:
    """The name of the function that iterates over the modules of a network."""
    frame = None if torch.compiler.is_compiling() else sys._getframe(2)
    while frame is not None and frame.f_code.co_name in ("children", "modules", "named_modules"):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_qualname


def _empty(kind: type[Converted], original: type[nn.Module], methods: tuple[str, ...]) -> Converted:
    made = converted_class(kind, original, methods)  # type: ignore[arg-type]
    return made.__new__(made)


@functools.cache
def converted_class(kind: Any, original: Any, methods: tuple[str, ...]) -> Any:
    """The class that combines `Converted`, or a subclass of it, with an original class whose methods run norms."""
    members: dict[str, Any] = {"_original": original, "_methods": methods, "__doc__": original.__doc__}
    members |= {"__module__": original.__module__, "__qualname__": original.__qualname__}
    if kind is Converted:
        members["forward"] = _with_signature(original.forward)
    members |= {name: _method(function) for name, function in _functions(original).items() if _freezes(name, function)}
    members |= {name: _method(getattr(original, name)) for name in methods}
    if hasattr(original, "from_pretrained"):
        members["from_pretrained"] = classmethod(_refuse_loading)
    if issubclass(original, GraphModule):
        members |= {"__call__": nn.Module.__call__, "recompile": _recompile, "__deepcopy__": _copy_graph}
    meta: Any = type(original)  # Lightning, for example, may have its own metaclass
    try:
        return meta(original.__name__, (kind, original), members)
    except Exception:  # a metaclass that registers classes may refuse a second one of this name
        return type.__new__(meta, original.__name__, (kind, original), members)


def _refuse_loading(cls: type[Converted], *args: Any, **kwargs: Any) -> Any:
    raise ConversionError(
        f"a converted {cls.__name__} cannot be loaded this way, because it would contain plain batch norms: load the "
        "original, convert it, and load the state dict of the converted network."
    )


@contextmanager
def _as_original(graph: Any) -> Iterator[None]:
    """A graph of torch.fx with its own class, into which PyTorch writes `forward`."""
    kind = type(graph)
    graph.__class__ = kind._original
    try:
        yield
    finally:
        graph.__class__ = kind


def _recompile(self: Any) -> Any:
    with _as_original(self):
        return self.recompile()


def _copy_graph(self: Any, memo: Any) -> Any:
    with _as_original(self):
        twin = copy.deepcopy(self, memo)
    twin.__class__ = converted_class(type(self).__mro__[1], type(twin), self._methods)  # type: ignore[arg-type]
    left_out = {name: value for name, value in vars(self).items() if name not in vars(twin)}
    vars(twin).update(copy.deepcopy(left_out, memo))
    return twin


def _with_signature(function: Any) -> Any:
    """`Converted.forward` with the signature of the original, which Hugging Face's Trainer inspects, for example."""

    @functools.wraps(function)
    def forward(self: Converted, *args: Any, statistics: str | None = None, **kwargs: Any) -> Any:
        return Converted.forward(self, *args, statistics=statistics, **kwargs)

    signature = inspect.signature(function)
    own = inspect.Parameter("statistics", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=str | None)
    parameters = list(signature.parameters.values())
    last = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    vars(forward)["__signature__"] = signature.replace(parameters=[*parameters[:last], own, *parameters[last:]])
    return forward


def _method(function: Any) -> Any:
    """Wrap a method that runs norms, so that a call from outside is one call of the network, with `statistics`."""
    freezes = _freezes(function.__name__, function)

    @functools.wraps(function)
    def method(self: Converted, *args: Any, **kwargs: Any) -> Any:
        with posing_as_batchnorms(self) if freezes else nullcontext():
            if CALLS.open and CALLS.open[-1].network is self:
                return function(self, *args, **kwargs)
            statistics = kwargs.pop("statistics", None)
            return run_with_record(self, self._choose(statistics, (args, kwargs)), function, args, kwargs)

    return method


def _methods_of(model: nn.Module) -> tuple[str, ...]:
    """The methods that run norms: their code mentions a child with norms, or another such method."""
    holders = {name for name, child in model.named_children() if holds_batchnorm(child)} | CHILDREN
    own = {name: _mentioned(function) for name, function in _functions(type(model)).items()}
    found: set[str] = set()
    while more := {name for name, names in own.items() if names & (holders | found)} - found:
        found |= more
    return tuple(sorted(found))


def _functions(kind: type[nn.Module]) -> dict[str, Any]:
    """The methods of a class that modules in general do not have."""
    names = [name for name in dir(kind) if not name.startswith("__") and not hasattr(nn.Module, name)]
    members = {name: inspect.getattr_static(kind, name) for name in names}
    return {name: member for name, member in members.items() if inspect.isfunction(member)}


def _mentioned(function: Any) -> set[str]:
    """The names and strings in the code of a function, without its decorators, and in functions inside it."""
    codes, names = [inspect.unwrap(function).__code__], set()
    for code in codes:
        names |= {*code.co_names, *code.co_freevars, *(const for const in code.co_consts if isinstance(const, str))}
        codes += [const for const in code.co_consts if inspect.iscode(const)]
    return names


def _freezes(name: str, function: Any) -> bool:
    """Whether a method looks for batch norms, as in order to freeze them."""
    return "freeze" in name or bool(_mentioned(function) & BATCHNORMS)


def convert(
    model: nn.Module,
    *,
    example: Any = None,
    only: str | None = None,
    statistics_batch_size: int | None = None,
    start: str | None = None,
    default_statistics: str | None = None,
    initial_gain: float | None = None,
    images: str | int | None = None,
    standardized_weights: bool = False,
    transition_rank: int | None = None,
) -> nn.Module:
    """Convert a network: a copy of `model` in which Batch Kalman Norms replace batch norms.

    The network keeps its class, its code and the names of its modules and parameters. With `population` statistics, the
    outputs are those of the original. Training starts with the transition A = 0 and the process noise R = the running
    variance. A state dict of the original loads with `strict=False`, which reinitializes A, R and the gain q.
    `print(converted.report)` shows the conversion, and `bkn_zoo.conversion.prove` checks it.

    Args:
        example: inputs of the network, which show how its norms are connected: a tensor, a tuple of inputs or a dict of
            named inputs, preferably with two or more images. None creates images that fit the first layer.
        only: the name of a part, such as "backbone". The rest stays unchanged, and the part takes `statistics` and has
            the attributes of a `Converted`. None is the whole network.
        statistics_batch_size: images per statistics group in training; None means the whole batch.
        start: the gain and the statistics mode. "scratch": the gain is 0.5, or 0.1 with standardized weights, and the
            mode is `sample` for groups of one image, `expected` for larger ones and `population` for whole batches.
            "pretrained": `start_near_population` with a gain of 0.01, and `population`. None: nearly batch
            normalization, and `population`.
        default_statistics: the statistics mode at inference, if a call does not choose one, instead of that of `start`.
        initial_gain: the gain q that training starts with, instead of that of `start`.
        images: the input that contains the images, by its name or place, if it is not the first.
        standardized_weights: standardize the weights of convolutions whose output goes directly into a norm, to train
            from scratch. This changes the outputs of a pretrained network.
        transition_rank: as in `BatchKalmanNorm`, for norms with one full A.
    """
    if not isinstance(model, nn.Module):
        raise ConversionError(f"a {type(model).__name__} cannot be converted: pass a torch.nn.Module.")
    gain, mode = _start(start, statistics_batch_size, standardized_weights)
    gain = gain if initial_gain is None else initial_gain
    mode = mode if default_statistics is None else default_statistics
    choose_statistics(False, mode, statistics_batch_size)
    check_gain(gain)
    name = only or ""
    check_convertible(model, name)
    whole: Any = copy_of(model)
    part: Any = whole.get_submodule(name)
    inputs = None if example is None else inputs_of(example)
    if inputs is not None and name:
        inputs = _inputs_of_part(model, name, inputs)
    size = _count(model)
    # Of other parts.
    earlier = getattr(whole, "report", Report((), (), size, size))
    rows, guesses = _convert(part, name, inputs, frozen_norms(whole, part), images, transition_rank)
    if standardized_weights:
        standardize_convolutions(part, part.foldable.values())
        part.standardized_weights = True
    part.statistics_batch_size, part.default_statistics = statistics_batch_size, mode
    for norm in linked_norms(part):
        if norm.has_prior:
            norm.set_gain(gain)
    if start == "pretrained":
        start_near_population(part, gain)
    if mode != "population":
        part._warn_if_untrained(mode)
    described = f"a gain of {gain:g}, and {mode!r} statistics at inference"
    report = Report(earlier.rows + rows, earlier.guesses + guesses, earlier.parameters_before, _count(whole), described)
    for module in (whole, *(part for part in whole.modules() if isinstance(part, Converted))):
        module.report = report
    return whole


def check_convertible(model: nn.Module, name: str) -> None:
    """Refuse a network, or its part with this name, if it cannot be converted."""
    kind = type(model).__name__
    if any(isinstance(module, LazyModuleMixin) for module in model.modules()):
        raise ConversionError(f"{kind} contains lazy modules with unknown sizes: run it once first.")
    try:
        part = model.get_submodule(name)
    except AttributeError:
        names = ", ".join(child for child, _ in model.named_children())
        raise UnknownNameError(f"{kind} has no part {name!r}: choose from {names}.") from None
    if part is model and kind in WRAPPERS and type(model).__module__.startswith("torch."):
        raise ConversionError(
            f"the network is wrapped in a {kind}: convert its .{WRAPPERS[kind]}, then wrap the result."
        )
    what = kind if part is model else f"the part {name!r}"
    atoms = name.split(".")
    around = [model.get_submodule(".".join(atoms[:count])) for count in range(len(atoms))]
    if any(isinstance(m, BatchKalmanNorm) or hasattr(type(m), "_original") for m in (*around, *part.modules())):
        raise ConversionError(
            f"{what} already contains, or is part of, a converted network: pass the original network, or "
            "choose another part with only=."
        )
    if isinstance(part, Network):
        twin = f"{part.name.rpartition('_')[0]}_bkn"
        raise ConversionError(f"{part.name} is a network of the zoo: use create_model({twin!r}) instead.")
    if isinstance(part, AnyBatchNorm):
        raise ConversionError(f"{type(part).__name__} is itself a batch norm: convert the network that contains it.")
    if not holds_batchnorm(part):
        raise ConversionError(
            f"{what} contains no batch norm, so there is nothing to convert: pass a network with batch norms."
        )
    taken = set(OWN_NAMES) & {*dir(type(part)), *vars(part), *part._modules, *part._parameters, *part._buffers}
    taken |= {"statistics"} & inspect.signature(type(part).forward).parameters.keys()
    # The whole network gets the report, too.
    if hasattr(model, "report") and not isinstance(model.report, Report):
        what, taken = kind, taken | {"report"}
    if taken:
        names = " and ".join(sorted(taken))
        raise ConversionError(f"{what} has an attribute or input {names}, which converted networks add: rename it.")
    if "forward" in vars(part):
        raise ConversionError(f"the forward of this {type(part).__name__} was replaced: define it in a class.")


def copy_of(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # a module may contain anything
        raise ConversionError(
            f"{type(model).__name__} cannot be copied ({reason_of(error)}): remove what cannot be copied or, if the "
            "first pass created it, convert the network before that pass."
        ) from error


def holds_batchnorm(module: nn.Module) -> bool:
    return any(isinstance(part, AnyBatchNorm) for part in module.modules())


def frozen_norms(whole: nn.Module, part: nn.Module) -> dict[str, str]:
    """The batch norms of a part that stay unchanged, and why."""
    trains = any(parameter.requires_grad for parameter in whole.parameters())
    left = {}
    for name, norm in part.named_modules():
        if not isinstance(norm, AnyBatchNorm):
            continue
        hooks = (norm._forward_hooks, norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks)
        known = type(norm).forward in (AnyBatchNorm.forward, nn.SyncBatchNorm.forward)
        own_forward = "forward" in vars(norm) or not (known or type(norm).__module__ == "timm.layers.norm_act")
        if norm.running_mean is None:
            left[name] = "keeps no running statistics"
        elif any(hooks):
            left[name] = "has hooks, which expect the inputs and outputs of a batch norm"
        elif own_forward or is_parametrized(norm):
            left[name] = f"a {type(norm).__name__} that does more than normalize"
        elif whole.training and not norm.training:
            left[name] = "frozen: in evaluation mode"
        elif trains and norm.weight is not None and not norm.weight.requires_grad:
            left[name] = "frozen: its weight has no gradient"
    return left


def _start(start: str | None, group: int | None, standardized_weights: bool) -> tuple[float, str]:
    """The gain that training starts with, and the statistics mode at inference."""
    if start == "scratch":
        mode = "population" if group is None else "sample" if group == 1 else "expected"
        return 0.1 if standardized_weights else INITIAL_GAIN, mode
    if start == "pretrained":
        return LEARNING_GAIN, "population"
    if start is not None:
        raise ConversionError(f"start is {start!r}: choose 'scratch' or 'pretrained'.")
    return BATCHNORM_GAIN, "population"


def _inputs_of_part(model: nn.Module, name: str, inputs: Inputs) -> Inputs:
    """The inputs of a part of a network when the network gets these inputs."""
    found: list[Inputs] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        found.append(Inputs(*tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))))

    why = ""
    with left_alone(), torch.no_grad():
        twin = copy.deepcopy(model)
        twin.eval()
        twin.get_submodule(name).register_forward_pre_hook(keep, with_kwargs=True, prepend=True)
        try:
            twin(*inputs.args, **inputs.kwargs)
        except Exception as error:  # perhaps after the part was called
            why = f" ({reason_of(error)})"
    if not found:
        raise ConversionError(f"the part {name!r} is not called with this example{why}: pass another one.")
    return found[0]


def _warn_of_missing_links(rows: Sequence[NormRow], made_up: bool, modes: int) -> None:
    """Warn of norms that the planner leaves unchanged, of a network without links, and of a plan for one mode only."""
    norms = list(dict.fromkeys(row.norm for row in rows))
    found = []
    for note in UNFIT:
        if left := [row.norm for row in rows if row.note == f"left: {note}"]:
            found.append(f"{len(left)} of {len(norms)} batch norms stay batch norms ({note}): {few_names(left)}")
    if len(norms) > 1 and not any(row.priors or row.left for row in rows):
        found.append(
            f"none of the {len(norms)} norms receives a belief, so they have no A, R and q: {few_names(norms)}"
        )
    if made_up and modes == 1:
        found.append(f"{len(norms)} norms were seen in training or in evaluation mode only: {few_names(norms)}")
    if found:
        whose = "inputs of the network instead of those created for its first layer" if made_up else "another example"
        text = f"{'; '.join(found)}. If that is wrong, pass {whose}: convert(model, example=inputs)."
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def _convert(
    part: Any, name: str, example: Inputs | None, left: dict[str, str], images: str | int | None, rank: int | None
) -> tuple[tuple[NormRow, ...], tuple[str, ...]]:
    """Convert a network in place, and return the rows and guesses of its report."""
    while True:
        norms = [n for n, m in part.named_modules() if isinstance(m, AnyBatchNorm) and n not in left]
        plans = plans_for(part, norms, example, images)
        unfit = {norm: why for plan in plans.values() for norm, why in plan.unfit.items()}
        left = left | unfit
        if not unfit:
            break
    calls = [call for plan in plans.values() for call in plan.calls]
    if not calls:
        groups: dict[str, list[str]] = {}
        for norm, why in left.items():
            groups.setdefault(why, []).append(norm)
        reasons = "; ".join(f"{few_names(names)}: {why}" for why, names in groups.items()) or "none is called"
        hint = ": convert a part with only=NAME in which each row is an image" if INTERLEAVED in left.values() else ""
        raise ConversionError(f"{type(part).__name__} calls no batch norm that can be converted ({reasons}){hint}.")
    _settle_shapes(calls)
    prefix = f"{name}." if name else ""
    rows = tuple(_report_rows(part, plans, left, prefix))
    _warn_of_missing_links(rows, example is None, len(plans))
    methods = _methods_of(part)
    replace_norms(part, plans, prefix, rank)
    part.__class__ = converted_class(Converted, type(part), methods)  # type: ignore[arg-type]
    part.foldable = plans[False].foldable if False in plans else {}
    part._norms, part._images = tuple(dict.fromkeys(call.name for call in calls)), images
    return rows, tuple(dict.fromkeys(guess for plan in plans.values() for guess in plan.guesses))


def _settle_shapes(calls: Sequence[NormCall]) -> None:
    """Remove the transition of a norm whose calls would need different transitions."""
    shapes = {(call.name, call.shapes) for call in calls}
    several = Counter(name for name, _ in shapes)
    for call in calls:
        if several[call.name] > 1:
            call.pieces, call.why = [], "none: its calls would need transitions of different shapes"


def _report_rows(
    model: nn.Module, plans: dict[bool, ConversionPlan], left: dict[str, str], prefix: str
) -> Iterator[NormRow]:
    called: set[str] = set()
    for plan in plans.values():
        new = [each for each in plan.calls if each.name not in called]
        for each in new:
            sources = dict.fromkeys(source for piece in each.pieces for source in piece.sources)
            priors = Counter(prefix + plan.calls[below].name for below, _ in sources)
            note = "" if priors else each.why or "none: no norm below"
            yield NormRow(prefix + each.name, dict(priors), each.shapes, note)
        called |= {each.name for each in new}
    for name, module in model.named_modules():
        if isinstance(module, AnyBatchNorm) and name not in called:
            yield NormRow(prefix + name, {}, (), f"left: {left.get(name, NEVER_CALLED)}")


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
