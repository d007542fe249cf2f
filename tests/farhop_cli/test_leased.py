"""What drains, biases and pins share: who, why and how long, and refusals that name the option."""

import pytest
import typer

from farhop.store.documents.document import DocumentError
from farhop_cli import leased


def test_every_leased_document_has_author_reason_and_length():
    made = leased.authorship("new racks", "ann", "90s")
    assert (made["why"], made["author"], made["for_s"]) == ("new racks", "ann", 90.0)
    assert made["at"].tzinfo is not None


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("author", "--by: bad"),
        ("why", "--why: bad"),
        ("ms", "--ms: bad"),
        ("for_s", "--for: give 1s to 7d"),
        ("x", "own"),
    ],
)
def test_a_refusal_names_the_option(capsys, field, says):
    with pytest.raises(typer.Exit):
        leased.refused(DocumentError(field, "bad"), {"x": "own"})
    assert capsys.readouterr().err == f"farhop: {says}\n"
