"""`python -m penstock` is the command `penstock`."""

from penstock.flows.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
