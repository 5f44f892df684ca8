"""Two Serve applications: one that answers, one that cannot be built."""

from ray import serve


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Says:
    def __init__(self, word: str) -> None:
        self.word = word

    def __call__(self, _request: object) -> str:
        return self.word


def build(args: dict[str, str]) -> serve.Application:
    return Says.bind(args["word"])


def fails(args: dict[str, str]) -> serve.Application:
    raise ValueError(f"the builder does not like this: {args['word']}")
