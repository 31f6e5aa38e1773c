"""Tree-based speculative decoding for Hugging Face transformers: the same text, faster.

    import hf_treespec
    out = model.generate(**inputs, tree_spec=True)

Importing the package adds the argument `tree_spec` to `generate`; `disable()` takes it out again.
"""

from .config import TreeSpecConfig
from .datastore import Datastore
from .demo_model import demo_model
from .detokenizer import Detokenizer
from .drafters import (
    Budget,
    Commit,
    DatastoreDrafter,
    DFlashDrafter,
    DraftContext,
    Drafter,
    EagleDrafter,
    EarlyExitDrafter,
    HydraDrafter,
    MedusaDrafter,
    ModelDrafter,
    MtpDrafter,
    NgramDrafter,
    Prompt,
    RecyclingDrafter,
    SharedKvDrafter,
    UnionDrafter,
    UniversalDrafter,
    drafter_names,
    fresh_tables,
    inspect_checkpoint,
    load_drafter,
    make_drafter,
    register_drafter,
)
from .errors import (
    CheckpointError,
    DatastoreError,
    DemoModelError,
    DrafterError,
    OptionError,
    TreeError,
    TreeSpecError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from .integration import disable, enable
from .packing import pack
from .reference import ScriptedDrafter, check_drafter
from .stats import DecodeStats, RoundRecord, Sizing
from .streaming import Stream, stream
from .tree import TokenTree

__all__ = [
    "Budget",
    "CheckpointError",
    "Commit",
    "DFlashDrafter",
    "Datastore",
    "DatastoreDrafter",
    "DatastoreError",
    "DecodeStats",
    "DemoModelError",
    "Detokenizer",
    "DraftContext",
    "Drafter",
    "DrafterError",
    "EagleDrafter",
    "EarlyExitDrafter",
    "HydraDrafter",
    "MedusaDrafter",
    "ModelDrafter",
    "MtpDrafter",
    "NgramDrafter",
    "OptionError",
    "Prompt",
    "RecyclingDrafter",
    "RoundRecord",
    "ScriptedDrafter",
    "SharedKvDrafter",
    "Sizing",
    "Stream",
    "TokenTree",
    "TreeError",
    "TreeSpecConfig",
    "TreeSpecError",
    "UnionDrafter",
    "UniversalDrafter",
    "UnsupportedArgumentError",
    "UnsupportedModelError",
    "check_drafter",
    "demo_model",
    "disable",
    "drafter_names",
    "enable",
    "fresh_tables",
    "inspect_checkpoint",
    "load_drafter",
    "make_drafter",
    "pack",
    "register_drafter",
    "stream",
]

__version__ = "0.1.0"

enable()
