"""Every error FlexCP raises, and nothing else.

The tree::

    FlexCPError
    ├── InputError              what the caller gave cannot be used (the command line exits 2)
    │   ├── LengthsError        a list of sample lengths is not a list of positive integers
    │   ├── UnknownNameError    no preset, policy or key of that name; the nearest is suggested
    │   ├── ConfigError         options that are wrong, or wrong together
    │   ├── DataError           files, tokenizer or length index cannot serve as training data
    │   ├── InfeasibleError     no plan exists for this input on this cluster
    │   │   └── SampleTooLongError
    │   ├── UnsupportedError    a model, mask or option that FlexCP would compute wrongly, so refuses
    │   ├── CheckpointError     a checkpoint is missing, damaged, or from another run
    │   └── MissingExtraError   an optional dependency is absent (also an ImportError)
    ├── PlanError               a plan breaks its own contract (every violation is listed)
    └── RunError                a training run cannot go on
        ├── RankFailedError     another rank died, stalled or raised
        │   └── RankLostError   its process is gone or silent: the others can go on without it
        ├── LossError           loss or gradient of a step is not finite
        ├── SaveError           a checkpoint or a model cannot be written
        └── DisagreementError   ranks hold different plans, configurations or versions
"""

from __future__ import annotations

import difflib
import json
import traceback
from collections.abc import Iterable


class FlexCPError(Exception):
    """Root of the tree: one line of cause and, where there is one, one line of remedy."""

    def __init__(self, cause: str, remedy: str = "") -> None:
        self.cause = cause
        self.remedy = remedy
        super().__init__(f"{cause}\n{remedy}" if remedy else cause)

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call the class with the joined text; errors cross process borders.
        return _rebuild, (type(self), self.__dict__)


def _rebuild(cls: type[FlexCPError], state: dict[str, object]) -> FlexCPError:
    error = cls.__new__(cls)
    FlexCPError.__init__(error, str(state["cause"]), str(state["remedy"]))
    error.__dict__.update(state)
    return error


def error_to_json(error: BaseException) -> str:
    """Kind, cause and remedy of an error, for another rank; a foreign error becomes a `RunError`."""
    if isinstance(error, FlexCPError):
        return json.dumps({"kind": type(error).__name__, "cause": error.cause, "remedy": error.remedy})
    return json.dumps({"kind": "RunError", "cause": f"{type(error).__name__}: {error}", "remedy": ""})


def summary_of(error: BaseException) -> str:
    """Kind, text and place of an error that is not FlexCP's own, in one line; the trace does not travel."""
    places = traceback.extract_tb(error.__traceback__)
    place = f" ({places[-1].filename}, line {places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {error}{place}"


def error_from_json(text: str) -> FlexCPError:
    """The error that `error_to_json` wrote, of the same kind."""
    state = json.loads(text)
    return _rebuild(_kinds(FlexCPError)[state.pop("kind")], state)


def _kinds(root: type[FlexCPError]) -> dict[str, type[FlexCPError]]:
    kinds = {root.__name__: root}
    for child in root.__subclasses__():
        kinds.update(_kinds(child))
    return kinds


class InputError(FlexCPError):
    """What the caller gave cannot be used."""


class LengthsError(InputError):
    """A list of sample lengths is not a list of positive integers."""


class UnknownNameError(InputError):
    """No entry of that name exists; names the nearest and all known ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        super().__init__(f"unknown {kind} {name!r}", f"{hint}Known: {', '.join(names)}.")


class ConfigError(InputError):
    """Options that are wrong, or wrong together."""


class DataError(InputError):
    """Files, tokenizer or length index cannot serve as training data."""


class InfeasibleError(InputError):
    """No plan exists for this input on this cluster."""


class SampleTooLongError(InfeasibleError):
    """One sample needs more ranks than the cluster has."""

    def __init__(self, sample: int | str, tokens: int, tokens_per_rank: int, ranks: int) -> None:
        self.ranks_needed = -(-tokens // tokens_per_rank)
        super().__init__(
            f"{sample if isinstance(sample, str) else f'sample {sample}'} has {tokens} tokens; "
            f"{ranks} ranks x {tokens_per_rank} tokens hold {ranks * tokens_per_rank}",
            f"It fits on {self.ranks_needed} ranks of this size; or raise the tokens per rank to "
            f"{-(-tokens // ranks)}, or leave the sample out.",
        )


class PlanError(FlexCPError):
    """A plan breaks its own contract."""

    def __init__(self, violations: Iterable[str]) -> None:
        self.violations = tuple(violations)
        super().__init__("plan is invalid: " + "; ".join(self.violations))


class UnsupportedError(InputError):
    """A model, mask or option that would be computed wrongly, so is refused."""


class RunError(FlexCPError):
    """A training run cannot go on."""


class RankFailedError(RunError):
    """Another rank died, stalled or raised."""


class RankLostError(RankFailedError):
    """The process of a rank is gone or silent; the others can go on without it."""


class LossError(RunError):
    """Loss or gradient of a step is not finite; no weight was changed."""


class SaveError(RunError):
    """A checkpoint or a model cannot be written."""


class DisagreementError(RunError):
    """Ranks hold different plans, configurations or versions."""


class CheckpointError(InputError):
    """A checkpoint is missing, damaged, or from another run."""


class MissingExtraError(InputError, ImportError):
    """An optional dependency is absent; the message is the command that installs it."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(
            f"{module} is not installed, and this part of FlexCP needs it",
            f"pip install 'flexcp[{extra}]'",
        )
