"""`python -m osora_cli`: the same as `osora`, for torchrun and other launchers."""

from osora_cli.cli.main import main

if __name__ == "__main__":
    main()
