"""`python -m meshloom COMMAND`: the command `meshloom`."""

from trainer.command.__main__ import main

if __name__ == "__main__":
    main()
