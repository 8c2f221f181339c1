"""``python -m app``: the terminal."""

from app.cli import main

if __name__ == "__main__":
    main()
