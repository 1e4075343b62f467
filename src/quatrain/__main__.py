"""`python -m quatrain` is the command `quatrain`."""

import sys


def main() -> int:
    """`cli.main`, where Ctrl-C while that is being imported is no traceback either."""
    try:
        from quatrain import cli
    except KeyboardInterrupt:
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
