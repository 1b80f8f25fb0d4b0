"""What `contract.py` says of a release, on small sources."""

from __future__ import annotations

import contract

OLD = {"m.py": 'def f(a):\n    "Says."\n    return a\nclass C:\n    x: int\n    def g(self): return 1\n'}
NEW = {"m.py": 'def f(a, b):\n    "Says more."\n    return a\nclass C:\n    x: str\n    def g(self): return 2\n'}


def test_a_change_is_one_line_and_a_docstring_is_none():
    targets = ["m:f", "m:C", "m:C.g"]
    assert contract.changes(OLD.get, {"m.py": OLD["m.py"].replace("Says", "Tells")}.get, targets) == []
    assert contract.changes(OLD.get, NEW.get, targets) == [
        "m:C: -1 +1: -x: int +x: str",
        "m:C.g: -1 +1: - return 1 + return 2",
        "m:f: -1 +1: -def f(a): +def f(a, b):",
    ]
    before, after = contract.hashed(OLD.get, targets), contract.hashed(NEW.get, targets)
    assert list(before) == sorted(targets)
    assert all(before[target] != after[target] for target in targets)
    assert len(contract.changes(OLD.get, {"m.py": "def f(a):\n" + "    a += 1\n" * 999}.get, ["m:f"])[0]) < 200
