"""Random documents for the tests of training."""

import random

from training.tree.documents import Branch, Document


def random_document(generator: random.Random, example: int, *, vocabulary: int = 256, longest: int = 24) -> Document:
    """One of the shapes that training makes: one answer, a pair, turns of a conversation, a group at one place."""

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(generator.randrange(vocabulary) for _ in range(count))

    trunk = tokens(generator.randint(1, longest))
    shape = generator.choice(("answer", "pair", "turns", "group"))
    places = [len(trunk)] * {"answer": 1, "pair": 2, "turns": 0, "group": generator.randint(2, 4)}[shape]
    if shape == "turns":
        places = sorted(generator.randint(1, len(trunk)) for _ in range(generator.randint(1, 4)))
    branches = tuple(
        Branch(place, tokens(generator.randint(1, longest // 2)), example, is_chosen=number != 1 or shape != "pair")
        for number, place in enumerate(places)
    )
    return Document(trunk, branches)


def random_documents(seed: int, count: int, **options: int) -> list[Document]:
    generator = random.Random(seed)
    return [random_document(generator, number, **options) for number in range(count)]
