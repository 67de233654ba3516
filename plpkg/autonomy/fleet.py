"""Thousands of devices on one machine: each person's learning runs alone, one after the other or on all cores.

Nothing passes between people. Ray's tasks are a few ahead of the results (memory stays bounded), three times retried.
Before Ray starts, a sentence says in how many tasks and processes they learn, and how many bytes each is sent.

Left out: rounds in which devices exchange something, devices that are slow or away, more than one thread a device.
"""

import hashlib
import itertools
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from plpkg.files import checkpoints
from plpkg.validation import one_of, shown, whole_number


def fleet(
    people: Mapping[str, object],
    learn: Callable[[str, object], dict[str, Any]],
    *,
    engine: str = "process",
    folder: str | Path | None = None,
    identity: dict[str, Any] | None = None,
    workers: int | None = None,
    chunk: int = 8,
    progress: bool = True,
) -> dict[str, dict[str, Any]]:
    """Let every person's device learn; the results come by name, in the order of ``people``.

    Parameters
    ----------
    people
        The task of each person, by name; asked for when its turn comes, so that a mapping may read it from a disk.
    learn
        Makes a dict of tensors, numbers, strings and lists, always the same, on one thread; the data stay as they are.
        With a folder, its keys are all texts or all whole numbers, and so are the names.
    engine
        ``"process"``, this one, or ``"ray"``: one that was started, else one on this machine, until the call ends.
    folder, identity
        Where finished chunks are, and the next call goes on if names and ``identity`` (settings, say) are the same.
    workers, chunk
        Ray's processes at a time (as many as cores by default), and people in a task.
    progress
        Show on standard error what Ray's tasks cost, then a bar: its seconds are measured, of what has ended.

    Raises
    ------
    ValueError
        Nobody, two people of one name, settings out of range, a folder with another run, or what it cannot keep.
    RuntimeError
        ``learn`` failed, or its process died again and again; the message names the person, or the chunk.
    ModuleNotFoundError
        Ray is not installed.
    """
    one_of("engine", engine, ("process", "ray"))
    workers = whole_number("workers", os.cpu_count() if workers is None else workers, 1)
    whole_number("chunk", chunk, 1)
    whole_number("len(people)", len(people), 1)
    names = list(people)
    if len(set(names)) < len(names):
        name, count = Counter(names).most_common(1)[0]
        raise ValueError(f"{count} people have the name {name!r}")
    identity = identity or {}
    if "people" in identity:
        raise ValueError(f"identity has people={identity['people']!r}, where the hash of all names stands")
    digest = hashlib.sha256(repr(names).encode()).hexdigest()
    identity = identity | {"people": digest[:16]}
    done = {}
    if folder is not None:
        folder = checkpoints.private_folder(folder)
        done = _finished(folder, identity)
    left = [name for name in names if name not in done]
    chunks = _chunks(people, left, chunk)
    if engine == "ray" and left:
        finished = _ray(chunks, learn, workers, math.ceil(len(left) / chunk), progress)
    else:
        finished = (_learned(each, learn) for each in chunks)
    with tqdm(total=len(names), initial=len(done), disable=not progress, desc="people") as bar:
        for results in finished:
            if folder is not None:
                for name, each in results.items():
                    if not isinstance(each, dict):
                        raise ValueError(f"learn must make a dict, and made {shown(each)} for {name!r}")
                number = names.index(next(iter(results)))  # of the first one's: nobody is in two files
                path = folder / f"{number:06d}.safetensors"
                checkpoints.save(path, {"identity": identity, "results": results})
            done |= results
            bar.update(len(results))
    return {name: done[name] for name in names}


def _finished(folder: Path, identity: dict) -> dict[str, dict]:
    """The results in a folder's files. :func:`plpkg.files.checkpoints.load` refuses a pickle that is named like one."""
    paths = {path.with_suffix(".safetensors") for path in folder.iterdir() if path.suffix in (".safetensors", ".pt")}
    done = {}
    for path in sorted(paths):
        saved = checkpoints.load(path, identity)
        if saved is not None:
            done |= saved["results"]
    return done


def _chunks(people: Mapping[str, object], names: list[str], size: int) -> Iterator[dict[str, object]]:
    """People's data, ``size`` of them at a time, asked for when their turn comes."""
    for begin in range(0, len(names), size):
        yield {name: people[name] for name in names[begin : begin + size]}


def _learned(people: dict[str, object], learn: Callable[[str, object], dict[str, Any]]) -> dict[str, dict]:
    """Each one's result, on one thread."""
    threads = torch.get_num_threads()
    results = {}
    torch.set_num_threads(1)
    try:
        for name, data in people.items():
            results[name] = learn(name, data)
    except Exception as error:
        raise RuntimeError(f"the device of {name!r} failed: {error!r}") from error
    finally:
        torch.set_num_threads(threads)
    return results


def _cost(people: int, tasks: int, workers: int, sent: int, data: int) -> str:
    """A sentence about Ray's tasks, of what is known before they start; ``people`` and bytes are those of the first."""
    return (
        f"{tasks:,} tasks of {people} people, {min(tasks, workers)} at a time, each in a process with one core: "
        f"a process gets {sent / 1e6:,.3f} MB (learn, and its model), a task {data / 1e6:,.3f} MB of data."
    )


def _ray(
    chunks: Iterator[dict], learn: Callable[[str, object], dict[str, Any]], workers: int, tasks: int, progress: bool
) -> Iterator[dict[str, dict]]:
    """Each chunk's results, in the order in which Ray has them."""
    try:
        import ray
        from ray.cloudpickle.cloudpickle import dumps
        from ray.exceptions import WorkerCrashedError
    except ModuleNotFoundError:
        raise ModuleNotFoundError("engine='ray' needs Ray: pip install 'plpkg[scale]'") from None
    started = not ray.is_initialized()
    if progress:
        first = next(chunks)
        chunks = itertools.chain([first], chunks)
        sent = len(dumps(learn))  # as Ray sends it
        data = len(dumps(first))
        said = _cost(len(first), tasks, workers, sent, data)
        if started:
            said += " Ray starts first, which may take half a minute."
        tqdm.write(said, file=sys.stderr)
    if started:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init("local", include_dashboard=False, log_to_driver=False, num_cpus=workers, object_store_memory=2**28)
    try:
        task = ray.remote(max_retries=3)(_learned)
        shared = ray.put(learn)
        running = {}  # tasks, and the names of their people
        while True:
            room = 2 * workers - len(running)  # a task for each worker, and one that waits
            for people in itertools.islice(chunks, room):
                running[task.remote(people, shared)] = ", ".join(map(repr, people))
            if not running:
                return
            (ready,), _ = ray.wait(list(running))
            names = running.pop(ready)
            try:
                yield ray.get(ready)
            except WorkerCrashedError as error:
                raise RuntimeError(f"the process of {names} died again and again") from error
    finally:
        if started:
            ray.shutdown()
