from osora_cli.words import counted


def test_one_is_singular_and_thousands_are_apart() -> None:
    assert [counted(n, "clip") for n in (0, 1, 2, 1200)] == ["0 clips", "1 clip", "2 clips", "1,200 clips"]
    assert [counted(n, "batch", "batches") for n in (1, 3)] == ["1 batch", "3 batches"]
