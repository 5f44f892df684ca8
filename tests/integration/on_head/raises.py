"""Fails as a user's program does."""


def work() -> None:
    raise ValueError("this is the user's mistake")


work()
