"""``python -m jitattn``, and the ``jitattn`` script: the command line, which may be interrupted."""

import sys


def main() -> int:
    """Run one command; return the exit status, 130 after Ctrl-C, also while modules are loaded."""
    try:
        from jitattn.tools import cli

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
