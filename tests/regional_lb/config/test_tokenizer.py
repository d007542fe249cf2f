from __future__ import annotations

import pytest
from pydantic import ValidationError

from regional_lb.config import TokenizerFiles


def test_a_template_may_be_left_out_and_a_file_may_not() -> None:
    assert TokenizerFiles(file="a.json").template is None
    with pytest.raises(ValidationError, match="file"):
        TokenizerFiles.model_validate({"template": "t"})
    with pytest.raises(ValidationError, match="template"):
        TokenizerFiles(file="a.json", template="")
