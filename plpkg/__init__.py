"""plpkg: the mechanisms behind private, personal language models.

Each room of the package holds one mechanism and has one notebook: :data:`ROOMS` lists them.
"""

import warnings

__version__ = "1.0.0"

ROOMS = {
    "communication": ("01", "bits and round trips per token"),
    "residual": ("02", "low-rank residual transmission between a cloud and a device"),
    "throughput": ("03", "tokens per second, memory, FLOPs, the score M_S"),
    "retention": ("04", "a KV cache under a budget: retaining heads, eviction, the methods beside them"),
    "clipping": ("05", "private training without a gradient for each example in memory"),
    "serving": ("06", "many LoRA adapters on one backbone, in one batch"),
    "serving.service": ("07", "the same as a service: adapters from a store as they are asked for, HTTP, replicas"),
    "autonomy": ("08", "learning on the device, offline and online, beside all baselines"),
}
"""Each room's notebook number, and what it holds. Tests, import contracts, claims and documents read this list.

A name with a dot is a room within a room that has a notebook of its own.
"""

# peft 0.21 asks transformers 5.23 for an attribute that is going away, at each get_peft_model: no user can help it.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
