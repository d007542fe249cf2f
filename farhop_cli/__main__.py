"""`python -m farhop_cli` is the `farhop` command."""

from farhop_cli.main import main

main()
