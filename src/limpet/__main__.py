"""``python -m limpet``: the command line."""

from limpet.cli import main

main(prog_name="limpet")
