"""Errors: of the input (`InputError`), and of a scheduler's plan (`PlanError`). All others are of
the code."""


class InputError(ValueError):
    """Something that a user gave cannot be used.

    A program turns this error into one line. Every other exception keeps its traceback, since it
    comes from code, perhaps the reader's own.
    """


class PlanError(RuntimeError):
    """A scheduler, perhaps the reader's own, breaks a rule that all schedulers keep.

    Args:
        rule: which rule is broken, and by which request.
        where: the file and line in which the scheduler plans.
    """

    def __init__(self, rule: str, where: str) -> None:
        super().__init__(f"{rule} ({where})")
        self.rule, self.where = rule, where
