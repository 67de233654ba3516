"""Learning that is spread over the times at which a device may learn, and survives being killed.

Offline learning may take longer than a night. After every few steps everything on which the next one depends is
written to one file: the trained values, the optimizer's state, the generator of the order, what of the epoch is left,
the log, the best state, and what a private task has spent. A run that was killed ends with the same bits as one that
was not, on the same machine; a private one if its noise has a seed.
"""

from collections.abc import Iterable
from pathlib import Path

from plpkg.autonomy.personal import Transfer
from plpkg.autonomy.transfer import Task
from plpkg.files import checkpoints
from plpkg.validation import whole_number

CHECKPOINT = "learning.safetensors"


def learn_in_windows(
    task: Task, windows: Iterable[Iterable[object]], folder: str | Path, *, checkpoint_every: int = 20
) -> Transfer | None:
    """Learn while it is allowed, from where the last call with this folder stopped.

    Parameters
    ----------
    task
        The task, made anew after a kill with the same arguments.
    windows
        One after the other; each item of a window is leave for one more step: ``range(7)`` allows seven, and
        :func:`plpkg.autonomy.availability.leave` as many as there is time for.
    folder
        Gets the checkpoint, which stays.
    checkpoint_every
        Steps that a kill may cost; a window's end costs none.

    Returns
    -------
    The person's model, or None if the windows ended before the task was done.

    Raises
    ------
    ValueError
        The folder holds another task (other settings, data, or a newer public model), or a damaged checkpoint.
    """
    whole_number("checkpoint_every", checkpoint_every, 1)
    folder = Path(folder)
    checkpoints.private_folder(folder)
    path = folder / CHECKPOINT
    state = checkpoints.load(path, task.identity)
    if state:
        task.load_state_dict(state["task"])
    saved = task.made

    def save() -> int:
        checkpoints.save(path, {"identity": task.identity, "task": task.state_dict()})
        return task.made

    for window in windows:
        for _ in window:
            if task.done:
                break
            task.step()
            if task.made - saved >= checkpoint_every:
                saved = save()
        if task.made > saved:
            saved = save()
        if task.done:
            break
    return task.result() if task.done else None
