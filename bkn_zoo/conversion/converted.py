"""Any batch-normalized network becomes a BKN network with the same weights and names."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves

from bkn_zoo.conversion.plan import INTERLEAVED, UNKNOWN, Plan, make_plan
from bkn_zoo.conversion.report import Report, Row
from bkn_zoo.conversion.rewrite import Forward, foldable, names_of, replace_norms, rewrite
from bkn_zoo.conversion.trace import first_sentence, is_batchnorm, part_hint, trace
from bkn_zoo.errors import ConversionError, InputError, UnknownNameError
from bkn_zoo.models.network import Network
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm, no_weight_decay
from bkn_zoo.norms.statistics import Statistics, choose_statistics

WRAPPERS = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
"""PyTorch's own, the last one by torch.compile, and where the network is in them."""


class Converted(nn.Module):
    """A network from `convert`: modules, parameters and attributes are the original's, norms are BKN.

    Attributes:
        report: what was done, norm by norm.
        statistics_batch_size: images per statistics group in training, and the group that `expected` assumes at
            inference; None means the whole batch.
        default_statistics: what normalizes at inference when a call does not say.
        foldable: norms that a convolution can take in at inference with population statistics, with its name.
    """

    report: Report
    foldable: dict[str, str]
    statistics_batch_size: int | None
    default_statistics: str
    _in_training: Forward
    _in_evaluation: Forward

    def __init__(self, original: nn.Module, in_training: Forward, in_evaluation: Forward) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(original))
        self._in_training, self._in_evaluation = in_training, in_evaluation

    def forward(self, *inputs: Any, statistics: str | None = None, **named: Any) -> Any:
        """What the original returns, normalized as asked.

        Args:
            inputs, named: the original's, by place or by name, but for those with a default, which keep it, and for
                `*args` and `**kwargs`, which are empty.
            statistics: "population", "sample" or "expected"; at inference only.
        """
        chosen = choose_statistics(self.training, statistics, self.statistics_batch_size, self.default_statistics)
        if not self.training and any(isinstance(x, Tensor) and x.shape[:1] == (0,) for x in (*inputs, *named.values())):
            chosen = Statistics("population")  # nothing to take statistics of, and nothing that needs them
        run = self._in_training if self.training else self._in_evaluation
        if torch.compiler.is_compiling():
            return run(self, chosen, *inputs, **named)
        try:
            return run(self, chosen, *inputs, **named)
        except (AttributeError, TypeError):
            check_norms(self)
            raise

    def no_weight_decay(self) -> set[str]:
        """The names of A, R and q, which weight decay would pull towards arbitrary values; timm asks for them so."""
        return no_weight_decay(self)


def check_norms(network: Converted) -> None:
    """Refuse a network in which other modules took the place of norms: its graph hands beliefs to what is there."""
    modules = dict(network.named_modules(remove_duplicate=False))
    for row in network.report.rows:
        norm = modules.get(row.norm)
        takes_beliefs = hasattr(norm, "priors") or (hasattr(norm, "carries_belief") and not row.priors)
        if not row.left and not takes_beliefs:
            raise InputError(
                f"{row.norm} is no longer the norm that the conversion put there, but something that takes no beliefs: "
                "replace it in the original, and convert that."
            )


OWN_NAMES = {*Converted.__annotations__, *vars(Converted)} - set(dir(nn.Module))
"""What a converted network has and a module has not: parts and attributes of the original must not be called so."""


def convert(
    model: nn.Module,
    *,
    only: str | None = None,
    statistics_batch_size: int | None = None,
    default_statistics: str = "population",
) -> nn.Module:
    """A copy of `model` in which every batch norm is a Batch Kalman Norm that receives the beliefs of those below it.

    Names of modules and parameters stay, so that a state dict of the original loads (with `strict=False`: A, R and q
    are new, and start anew from the variances that it brings). With `population` statistics, the default at inference,
    the outputs are the original's; training starts from nearly batch normalization, with q = 0.99, A = 0 and R the
    running variance. `print(converted.report)` says what was done, and `bkn_zoo.conversion.prove` shows that it is
    right.

    Args:
        model: any module that torch.fx can trace when batch norms, and modules that hold none, are taken as they are.
        only: the name of a part, such as "backbone", where the whole cannot be traced. The rest stays as it is, and
            may have parts that were converted before; the part is then what takes `statistics` and has the attributes
            of a `Converted`. None, or the empty name, is the whole.
        statistics_batch_size: images per statistics group in training; None means the whole batch.
        default_statistics: what normalizes at inference when a call does not say.
    """
    if not isinstance(model, nn.Module):
        raise ConversionError(f"a {type(model).__name__} cannot be converted: pass a torch.nn.Module.")
    name = only or ""
    _check(model, name)
    choose_statistics(False, default_statistics, statistics_batch_size)
    whole = _copy(model)
    part = whole.get_submodule(name)
    before = _count(whole)
    converted = _convert(part, name, left=_frozen(whole, part))
    converted.statistics_batch_size, converted.default_statistics = statistics_batch_size, default_statistics
    if part is whole:
        converted.report = replace(converted.report, parameters_before=before, parameters_after=_count(converted))
        return converted
    for place in names_of(whole)[part]:
        whole.set_submodule(place, converted)
    whole.report = converted.report = replace(  # type: ignore[assignment]
        converted.report, parameters_before=before, parameters_after=_count(whole)
    )
    return whole


def _check(model: nn.Module, name: str) -> None:
    """Refuse what cannot be converted: the part of this name, or the whole, which has none."""
    kind = type(model).__name__
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ConversionError(f"{kind} holds scripted code, which cannot be traced: pass the module as it was before.")
    if any(isinstance(module, LazyModuleMixin) for module in model.modules()):
        raise ConversionError(f"{kind} holds lazy modules, whose sizes are not known yet: run it once first.")
    try:
        part = model.get_submodule(name)
    except AttributeError:
        names = ", ".join(child for child, _ in model.named_children())
        raise UnknownNameError(f"{kind} has no part {name!r}: choose from {names}.") from None
    if part is model and kind in WRAPPERS and type(model).__module__.startswith("torch."):
        raise ConversionError(f"a {kind} is around the network: convert its .{WRAPPERS[kind]}, then wrap the result.")
    what = kind if part is model else f"the part {name!r}"
    atoms, modules = name.split("."), list(part.modules())
    around = [model.get_submodule(".".join(atoms[:count])) for count in range(len(atoms))]
    if any(isinstance(module, Converted | BatchKalmanNorm) for module in (*around, *modules)):
        raise ConversionError(
            f"{what} has Batch Kalman Norms in it or around it already: pass the network as it was before, or name "
            "another part as only=."
        )
    if isinstance(part, Network):
        twin = f"{part.name.rpartition('_')[0]}_bkn"
        raise ConversionError(f"{part.name} is one of the zoo's own networks: take create_model({twin!r}) instead.")
    if not any(map(is_batchnorm, modules)):
        raise ConversionError(f"{what} holds no batch norm: there is nothing to convert.")
    taken = OWN_NAMES & {*vars(part), *part._modules, *part._parameters, *part._buffers}
    if part is not model and hasattr(model, "report") and not isinstance(model.report, Report):
        what, taken = kind, {"report"}
    if taken:
        names = " and ".join(sorted(taken))
        raise ConversionError(
            f"{what} has something called {names}, which is what a converted network calls its own: rename it."
        )
    devices = sorted({str(tensor.device) for tensor in (*part.parameters(), *part.buffers())})
    if len(devices) > 1:
        raise ConversionError(f"{what} is spread over {' and '.join(devices)}: move it to one device, then convert it.")


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # a module may hold anything
        raise ConversionError(
            f"{type(model).__name__} cannot be copied because of its {_uncopyable(model)} ({first_sentence(error)}): "
            "remove it or, if the first pass made it, convert the network before that."
        ) from error


def _uncopyable(model: nn.Module) -> str:
    """The name of an attribute that cannot be copied."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            try:
                if value is not module._modules:
                    copy.deepcopy(value)
            except Exception:
                return f"{name}.{attribute}".lstrip(".")
    return "modules"


def _frozen(whole: nn.Module, part: nn.Module) -> dict[str, str]:
    """The batch norms of a part that stay as they are, and why."""
    trains = any(parameter.requires_grad for parameter in whole.parameters())
    left = {}
    for name, norm in part.named_modules():
        if not isinstance(norm, _BatchNorm):
            continue
        hooks = (norm._forward_hooks, norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks)
        own_forward = type(norm).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
        if norm.running_mean is None:
            left[name] = "keeps no running statistics"
        elif any(hooks):
            left[name] = "has hooks, which expect what a batch norm takes and gives"
        elif is_parametrized(norm):
            left[name] = "has parametrized weights"
        elif "forward" in vars(norm):
            left[name] = "its forward was replaced by another"
        elif own_forward and type(norm).__module__ != "timm.layers.norm_act":
            left[name] = f"a {type(norm).__name__}, which does more than normalize"
        elif whole.training and not norm.training:
            left[name] = "frozen: in evaluation mode"
        elif trains and norm.weight is not None and not norm.weight.requires_grad:
            left[name] = "frozen: its weight takes no gradient"
    return left


def _convert(model: nn.Module, name: str, left: dict[str, str]) -> Converted:
    """Convert in place, and return what takes the model's place, which is a part of this name or the whole."""
    graphs, plans = [], []
    for training in (True, False):
        twin = _twin(model)
        twin.train(training)
        graphs.append(trace(twin, name))
        plans.append(make_plan(twin, graphs[-1], left))
        left = plans[-1].left
        _take_constants(model, twin, graphs[-1])
    if left.keys() != plans[0].left.keys():  # what has to be left in evaluation is left in training too
        return _convert(model, name, left)
    _check_plans(model, name, *plans)
    rows = tuple(_rows(model, *plans))
    for plan in plans:
        replace_norms(model, plan)
    folding = foldable(model, graphs[1], plans[1])
    in_training, in_evaluation = (rewrite(model, graph, plan) for graph, plan in zip(graphs, plans, strict=True))
    converted = Converted(model, in_training, in_evaluation)
    converted.foldable = folding
    guesses = tuple(dict.fromkeys(guess for plan in plans for guess in plan.guesses))
    converted.report = Report(rows, guesses, 0, 0)
    return converted


def _twin(model: nn.Module) -> nn.Module:
    """A copy to be traced: what a forward keeps, as in a cache, are stand-ins there.

    Tensors and generators are the very same, since the graph may have them as constants.
    """
    leaves = [leaf for module in model.modules() for leaf in tree_leaves(vars(module))]
    return copy.deepcopy(model, {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor | torch.Generator)})


def _take_constants(model: nn.Module, twin: nn.Module, graph: fx.Graph) -> None:
    """Let the model have the constants that its traced twin was given for the graph."""
    for name in {str(node.target) for node in graph.find_nodes(op="get_attr")}:
        if name in vars(twin) and name not in vars(model):
            setattr(model, name, vars(twin)[name])


def _check_plans(model: nn.Module, name: str, training: Plan, evaluation: Plan) -> None:
    if not training.calls and not evaluation.calls:
        reasons = "; ".join(f"{norm}: {why}" for norm, why in training.left.items())
        if all(why == UNKNOWN for why in training.left.values()):
            raise ConversionError(
                f"{type(model).__name__} passes no input on to a batch norm: give its forward one that has no default, "
                "since those with a default keep it, and a name, since *args and **kwargs are empty."
            )
        hint = part_hint(model, name) if INTERLEAVED in training.left.values() else ""
        hint = f": convert {hint}, to which each row is an image" if hint else ""
        raise ConversionError(f"{type(model).__name__} calls no batch norm that can be converted ({reasons}){hint}.")
    known = {call.name: call.shapes for call in training.calls}
    for call in evaluation.calls:
        if known.get(call.name, call.shapes) != call.shapes:
            raise ConversionError(
                f"{call.name} has other norms below it in training than in evaluation: make the two paths one."
            )


def _rows(model: nn.Module, training: Plan, evaluation: Plan) -> list[Row]:
    rows = []
    names = names_of(model)
    named = {call.name for call in training.calls}
    for plan, calls in (
        (training, training.calls),
        (evaluation, [call for call in evaluation.calls if call.name not in named]),
    ):
        for call in calls:
            priors: dict[str, int] = {}
            for below, _ in (source for piece in call.pieces for source in piece.sources):
                name = plan.calls[below].name
                priors[name] = priors.get(name, 0) + 1
            path = tuple(dict.fromkeys(name for piece in call.pieces for name in piece.path))
            note = "" if priors else call.why or "none: no norm below"
            also = tuple(names[model.get_submodule(call.name)][1:])
            rows.append(Row(call.name, priors, path, call.shapes, note, also))
    called = {row.norm for row in rows}
    for name, module in model.named_modules():
        if is_batchnorm(module) and name not in called:
            note = f"left: {training.left.get(name, 'never called')}"
            rows.append(Row(name, {}, (), (), note, tuple(names[module][1:])))
    return rows


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
