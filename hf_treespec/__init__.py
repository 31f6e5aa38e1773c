"""Tree-based speculative decoding for Hugging Face transformers: the same text, faster.

    import hf_treespec
    out = model.generate(**inputs, tree_spec=True)

Importing the package adds the argument `tree_spec` to `generate`; `disable()` takes it out again.
"""

from .config import TreeSpecConfig
from .drafters import (
    Budget,
    Commit,
    DraftContext,
    Drafter,
    ModelDrafter,
    NgramDrafter,
    Prompt,
    drafter_names,
    make_drafter,
    register_drafter,
)
from .errors import (
    DemoModelError,
    DrafterError,
    OptionError,
    TreeError,
    TreeSpecError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from .integration import disable, enable
from .stats import DecodeStats, RoundRecord
from .streaming import Stream, stream
from .tree import TokenTree

__version__ = "0.1.0"

enable()
