"""Whether the hub of Hugging Face can be asked at all."""

from pathlib import Path


def must_be_local(name: str) -> bool:
    """Whether a model's name can only be a folder, or what the hub gave before: the hub does not answer one request.

    Transformers asks six times for each file that it lacks, for half a minute. It asks nothing about a folder.
    """
    if Path(name).is_dir():
        return True
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # of whichever library carries the request in this release; HF_HUB_OFFLINE is one, too
        return True
    return False
