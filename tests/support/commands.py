"""Commands, run within this process."""

from __future__ import annotations

import pytest

from tfexport.__main__ import main


def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[str, str]:
    monkeypatch.setattr("sys.argv", ["tfexport", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    assert caught.value.code == (2 if "error: " in err else 0), err
    return out, err
