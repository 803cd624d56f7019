"""What is wrong with the input, told apart from what is wrong with the code."""


class InputError(ValueError):
    """Something that a user gave cannot be used. A program turns it into one line; every other
    exception keeps its traceback, since it comes from code, perhaps the reader's own.
    """
