"""What is wrong with the input, told apart from what is wrong with the code, and with a plan."""


class InputError(ValueError):
    """Something that a user gave cannot be used. A program turns it into one line; every other
    exception keeps its traceback, since it comes from code, perhaps the reader's own.
    """


class PlanError(RuntimeError):
    """A scheduler, perhaps the reader's own, breaks a rule that all keep.

    Args:
        rule: which, and by which request.
        where: the file and line in which the scheduler plans.
    """

    def __init__(self, rule: str, where: str) -> None:
        super().__init__(f"{rule} ({where})")
        self.rule, self.where = rule, where
