"""placeholder"""

from typing import Any


class Careful:
    def __init__(self, settler: Any) -> None:
        self.settle = settler.settle
