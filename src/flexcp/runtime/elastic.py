"""Going on with fewer ranks when one is lost: the local form of what torchrun does with nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flexcp.core.errors import RankLostError
from flexcp.runtime.launch import launch


def launch_elastic(
    target: Callable[..., Any],
    nproc: int,
    args: Sequence[Any] = (),
    *,
    notify: Callable[[str], object],
    **options: Any,
) -> list[Any]:
    """`launch`; each time a rank was killed or has stalled, once more with one rank fewer, down to one.

    `target` must continue by itself from what it has saved. A rank that raises ends the run, for it would
    raise again; so does a rank that is lost after SIGTERM.

    Args:
        target: as for `launch`.
        nproc: ranks to begin with.
        args: as for `launch`.
        notify: told which rank was lost and what happens now.
        **options: the keywords of `launch`.

    Raises:
        FlexCPError: as `launch`; a `RankLostError` only of the last rank.
    """
    while True:
        try:
            return launch(target, nproc, args, **options)
        except RankLostError as error:
            if nproc == 1:
                raise
            nproc -= 1
            rest = "1 rank" if nproc == 1 else f"{nproc} ranks"
            notify(f"{error.cause}; going on with {rest} from the newest checkpoint")
