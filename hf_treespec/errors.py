"""The exceptions of hf_treespec. Every message names the thing, its value and the way out.

TreeSpecError
├── OptionError             (ValueError)           a knob of `TreeSpecConfig`: unknown, wrong type or out of range
├── UnsupportedArgumentError (ValueError)          an argument of `generate` that a tree cannot honour
├── UnsupportedModelError   (NotImplementedError)  a target whose cache or attention cannot hold a tree
├── DrafterError            (RuntimeError)         an unknown drafter, one unfit for the target, or a broken contract
│   └── CheckpointError                           a drafter's files: not there, of no known format, or incomplete
├── DatastoreError          (ValueError)           a datastore that cannot be built, opened or used here
├── TreeError               (ValueError)           a `TokenTree` that is not a tree
└── DemoModelError          (RuntimeError)         the embedded demo model cannot be had
"""


class TreeSpecError(Exception):
    """Base of everything that hf_treespec raises on purpose."""


class OptionError(TreeSpecError, ValueError):
    """A knob of `TreeSpecConfig` is unknown, of the wrong type or out of its range."""


class UnsupportedArgumentError(TreeSpecError, ValueError):
    """An argument of `generate` cannot be honoured together with `tree_spec`."""


class UnsupportedModelError(TreeSpecError, NotImplementedError):
    """The target's cache or attention cannot verify a tree."""


class DrafterError(TreeSpecError, RuntimeError):
    """A drafter is unknown, does not fit the target, or broke its contract."""


class CheckpointError(DrafterError):
    """A drafter's files are not there, of no known format, or incomplete."""


class DatastoreError(TreeSpecError, ValueError):
    """A datastore cannot be built, opened, or used with this target or tokenizer."""


class TreeError(TreeSpecError, ValueError):
    """Arrays that do not describe a tree."""


class DemoModelError(TreeSpecError, RuntimeError):
    """The embedded demo model cannot be loaded from any source."""
