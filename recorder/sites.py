"""The version of the format, and the registry of sites: where in a training step a value is seen, such as `output`.

Code that records, expects, compares or shows values uses this registry. To add a site in a minor version, add an entry
to `ALL_SITES`, a line to FORMAT.md, and the hook that records the site. This module imports nothing of the package and
no third party, because settings name sites and are read first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

FORMAT_NAME = "recorder"
FORMAT_VERSION = (1, 4)
"""The major and the minor version of the format. Readers refuse another major version, and accept any minor one."""
MAX_COUNT = 1 << 53
"""The bound on a row's integers: exact in float64, and sums or products with item sizes fit in int64."""


class Kind(Enum):
    """The kind of the values at a site."""

    ACTIVATION = "activation"
    """A value of the batch, or its gradient. Each rank has the values of its samples."""
    STATE = "state"
    """A value that outlives the step, or its gradient. Ranks have replicas or chunks of it."""
    NUMBER = "number"
    """A number for a step, from the program or the recorder."""


class Expected(Enum):
    """Which values `doctor` expects if a rule selects a site of a module."""

    CALL = "call"
    """A value at each step in which the module is called."""
    PARAMETER = "parameter"
    """A value of each of the module's own parameters at each step of its optimizer."""
    BUFFER = "buffer"
    """A value of each of the module's own buffers at each step of an optimizer."""
    NOTHING = "nothing"
    """No certain values. The program alone decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The properties of one site."""

    name: str
    kind: Kind
    phase: str
    """The usual phase of the site's values. Other phases, such as ``recompute``, occur."""
    expected: Expected
    gradient: str | None = None
    """The site of the gradients of this site's values. It is the site itself if only the phase tells them apart."""
    is_gradient: bool = False
    """True if all values of the site are gradients."""
    is_updated: bool = False
    """True if the optimizer step writes the site's values."""
    is_given: bool = False
    """True if the program passes the values in. No module has computed them."""
    is_of_optimizer: bool = False
    """True if the values belong to the optimizer and not to the module. Without an optimizer there are none."""
    is_selectable: bool = True
    """False if rules cannot name the site. Its rows are written along with other values that a rule keeps."""
    since: int = 0
    """The minor version of the format that added the site."""


ALL_SITES = (
    Site(
        name="input",
        kind=Kind.ACTIVATION,
        phase="forward",
        expected=Expected.CALL,
        gradient="grad_input",
        is_given=True,
    ),
    Site(name="output", kind=Kind.ACTIVATION, phase="forward", expected=Expected.CALL, gradient="grad_output"),
    Site(name="grad_input", kind=Kind.ACTIVATION, phase="backward", expected=Expected.CALL, is_gradient=True),
    Site(name="grad_output", kind=Kind.ACTIVATION, phase="backward", expected=Expected.CALL, is_gradient=True),
    Site(
        name="param", kind=Kind.STATE, phase="optimizer", expected=Expected.PARAMETER, gradient="grad", is_updated=True
    ),
    Site(name="grad", kind=Kind.STATE, phase="optimizer", expected=Expected.PARAMETER, is_gradient=True),
    Site(name="buffer", kind=Kind.STATE, phase="optimizer", expected=Expected.BUFFER),
    Site(
        name="optim",
        kind=Kind.STATE,
        phase="optimizer",
        expected=Expected.PARAMETER,
        is_updated=True,
        is_of_optimizer=True,
    ),
    Site(name="tap", kind=Kind.ACTIVATION, phase="forward", expected=Expected.NOTHING, gradient="tap"),
    Site(name="scalar", kind=Kind.NUMBER, phase="forward", expected=Expected.NOTHING, is_given=True),
    Site(
        name="call",
        kind=Kind.ACTIVATION,
        phase="forward",
        expected=Expected.NOTHING,
        is_given=True,
        is_selectable=False,
        since=3,
    ),
    Site(
        name="probe",
        kind=Kind.NUMBER,
        phase="forward",
        expected=Expected.NOTHING,
        is_given=True,
        is_selectable=False,
        since=4,
    ),
    Site(
        name="update",
        kind=Kind.STATE,
        phase="optimizer",
        expected=Expected.NOTHING,
        is_of_optimizer=True,
        is_selectable=False,
        since=4,
    ),
    Site(
        name="tokens",
        kind=Kind.NUMBER,
        phase="forward",
        expected=Expected.NOTHING,
        is_given=True,
        is_selectable=False,
        since=4,
    ),
)
"""All sites, in the order in which they are shown."""

SITES = tuple(site.name for site in ALL_SITES if site.is_selectable)
"""The sites that rules and users name."""
CALL = "call"
"""The site of what a replay of a module's call needs besides arguments: facts as JSON, parameters, buffers."""
PROBE = "probe"
"""The site of rows of `keep=probe`, and their kind of shard. A row has one number of a value for each of many steps."""
UPDATE = "update"
"""The site of the probe's numbers that say how far an optimizer step moved each parameter."""
TOKENS = "tokens"
"""The site of rows of `keep=tokens`, in the probe's shards. A row has a value's sketches (digests) of several calls."""
OF_REPLAY = ("input", "output", "grad_input", "grad_output", "grad")
"""The sites whose tensors a replay uses or compares with its results."""
SITE_OF: Mapping[str, Site] = {site.name: site for site in ALL_SITES}

ACTIVATIONS = tuple(site.name for site in ALL_SITES if site.kind is Kind.ACTIVATION)
STATES = tuple(site.name for site in ALL_SITES if site.kind is Kind.STATE and site.is_selectable)
GRADIENTS = tuple(site.name for site in ALL_SITES if site.is_gradient)
NUMBERS = tuple(site.name for site in ALL_SITES if site.kind is Kind.NUMBER)
GIVEN_SITES = tuple(site.name for site in ALL_SITES if site.is_given)
UPDATED = tuple(site.name for site in ALL_SITES if site.is_updated)
OF_CALLS = tuple(site.name for site in ALL_SITES if site.expected is Expected.CALL)
VALUES_OF_CALLS = tuple(site for site in OF_CALLS if site not in GRADIENTS)
"""The sites of a call's arguments and results."""
OF_PARAMETERS = tuple(site.name for site in ALL_SITES if site.expected is Expected.PARAMETER)
OF_BUFFERS = tuple(site.name for site in ALL_SITES if site.expected is Expected.BUFFER)
PROGRAM_SITES = tuple(site.name for site in ALL_SITES if site.expected is Expected.NOTHING)
"""The sites of values that the program names. No module tree lists them."""
LASTING_SITES = tuple(site for site in STATES if site not in GRADIENTS)
"""The sites of values that last from step to step. Gradients are not among them."""
OF_MODULES = tuple(site.name for site in ALL_SITES if site.kind is Kind.STATE and not site.is_of_optimizer)
"""The sites of a module's own state, and of its gradients."""
HELD_BY_MODULES = tuple(site for site in OF_MODULES if site not in GRADIENTS)
GRADIENT_OF: Mapping[str, str] = {site.name: site.gradient for site in ALL_SITES if site.gradient}
"""For each site of values, the site of their gradients."""
VALUE_OF: Mapping[str, str] = {gradient: name for name, gradient in GRADIENT_OF.items()}
"""For each site of gradients, the site of their values."""


def values_of(site: str) -> str:
    """Return the site of a gradient's values, such as ``output`` for ``grad_output``. Return other sites unchanged."""
    return VALUE_OF.get(site, site)


SKIPPED = "skipped"
"""The scalar that is 1 at each step whose update `GradScaler` skipped because gradients overflowed."""
EVALUATION_LOSS = "eval_loss"
"""The scalar with the mean loss of an evaluation. The recorder finds it if the program gives no validation loss."""
CLIP_NORM, CLIP_LIMIT = "clip.norm", "clip.max_norm"
"""The scalars of a clip: the norm of all gradients before it, 0 if it is not finite, and the limit of the program."""
RATE = "lr."
"""The beginning of the names of scalars that are learning rates; the optimizer and the group follow: ``lr.AdamW.0``."""
_LOSS = re.compile(r"(.*[./])?loss")
_VALIDATION = re.compile(
    r"(.*[./_])?(val|valid|validation|eval|evaluation|test|dev)[./_]loss(/dataloader_idx_\d+)?", re.IGNORECASE
)


def is_loss(site: str, name: str) -> bool:
    """Whether a value is a scalar whose name says that it is a loss, such as ``train/loss``."""
    return site == "scalar" and _LOSS.fullmatch(name) is not None


def is_validation_loss(site: str, name: str) -> bool:
    """Whether a value is a scalar named as the loss of a validation, such as ``val_loss`` or ``validation/loss``."""
    return site == "scalar" and _VALIDATION.fullmatch(name) is not None


LABELS = "loss.labels"
"""The name of the labels that a loss has, among the inputs of the model."""
is_labels = re.compile(r"(.*[._\]\[])?(labels?|targets?|y)[\]']*", re.IGNORECASE).fullmatch
"""Whether the name of an argument says that the argument has labels."""


def may_mask(site: str, name: str) -> bool:
    """Whether infinities in a value may be intended, as in an attention mask. A NaN is never intended.

    A gradient, optimizer state or a loss is never infinite on purpose. All checks for finite values use this function
    and those below: the warning during training, `recorder first` and the rule `nonfinite` of `check`.
    """
    known = SITE_OF.get(site)
    return known is None or not (known.is_gradient or known.is_of_optimizer or is_loss(site, name))


def is_mask(nan_count: Any, inf_count: Any, may_be: Any, most_infinite: Any = math.inf) -> Any:
    """Whether infinities are a mask and no finding: no NaN, and no more infinities than in the first infinite record.

    Counts may be arrays. `may_be` says whether `may_mask` holds and, if known, whether the value's first record was a
    mask. `most_infinite` is the number of infinities in the value's first infinite record of this shape.
    """
    return (inf_count > 0) & (nan_count == 0) & may_be & (inf_count <= most_infinite)


def tells_skip(site: str, name: str) -> bool:
    """Whether a value is the scalar `SKIPPED`, which says at each step whether `GradScaler` skipped it."""
    return (site, name) == ("scalar", SKIPPED)


def may_overflow(site: str) -> bool:
    """Whether NaN and infinities at this site are excused in steps that `GradScaler` skips to find its scale."""
    return site in GRADIENTS


AT_LEAST = "at_least"
"""The value of `counts` in the `note` of a row whose counts are 0, or 1 for at least one NaN or infinite element."""


def full_name(path: str, name: str) -> str:
    """Return the full name in the model of a module's parameter, buffer or child."""
    return f"{path}.{name}" if path and name else path or name


OBJECTIVE = "objective."
"""The prefix of taps and scalars that `recorder.objective` makes."""
OBJECTIVE_NORM, OBJECTIVE_COSINE = f"{OBJECTIVE}norm.", f"{OBJECTIVE}cosine."
"""The prefixes of two kinds of scalars: the norm of an objective's gradient, and the cosine between the gradients of
two objectives, ``objective.cosine.A:B`` with sorted names. If the objectives of a module share several tensors in a
micro-step, the names for the second tensor end in ``#2``, and so on."""


def objectives_in(name: str, start: str) -> tuple[str, str]:
    """Split a tap's or scalar's name into the names of objectives behind the prefix `start`, and ``#2`` or the like."""
    names, mark, number = name.removeprefix(start).rpartition("#")
    return (names, mark + number) if names and number.isdecimal() else (name.removeprefix(start), "")
