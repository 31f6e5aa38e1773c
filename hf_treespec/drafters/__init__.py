"""Everything that drafts. One file for each drafter, one import line here."""

from . import hydra_format
from .base import Budget, Commit, DraftContext, Drafter, Prompt, drafter_names, make_drafter, register_drafter
from .checkpoint import inspect_checkpoint, load_drafter
from .datastore import DatastoreDrafter
from .dflash import DFlashDrafter
from .eagle import EagleDrafter
from .early_exit import EarlyExitDrafter
from .hydra import HydraDrafter
from .medusa import MedusaDrafter
from .model import ModelDrafter
from .mtp import MtpDrafter
from .ngram import NgramDrafter
from .recycling import RecyclingDrafter, fresh_tables
from .shared_kv import SharedKvDrafter
from .union import UnionDrafter
from .universal import UniversalDrafter

__all__ = [
    "Budget",
    "Commit",
    "DFlashDrafter",
    "DatastoreDrafter",
    "DraftContext",
    "Drafter",
    "EagleDrafter",
    "EarlyExitDrafter",
    "HydraDrafter",
    "MedusaDrafter",
    "ModelDrafter",
    "MtpDrafter",
    "NgramDrafter",
    "Prompt",
    "RecyclingDrafter",
    "SharedKvDrafter",
    "UnionDrafter",
    "UniversalDrafter",
    "drafter_names",
    "fresh_tables",
    "inspect_checkpoint",
    "load_drafter",
    "make_drafter",
    "register_drafter",
]
