"""Lets an unmodified SGLang wheel import and serve on a CPU: stands in for the GPU packages it imports and never calls.

`install.sh` copies this file into the SGLang environment together with a one-line `.pth` file, so that it runs at the
start of every interpreter there: SGLang's scheduler and detokenizer are processes of their own, which an import in the
server's main process would not reach.

| package     | why SGLang needs it                        | what is given instead                            |
|-------------|--------------------------------------------|--------------------------------------------------|
| triton      | kernels are *defined* when modules load    | kernels can be defined; launching one raises     |
| sgl_kernel  | names of CUDA and AMX kernels are imported | every name is importable; calling one raises     |
| torchvision | its wheel is a CUDA build                  | two operators that it expects to be are declared |

Invariants: nothing happens unless SGLANG_USE_CPU_ENGINE=1 when the interpreter starts, so other programs of the
environment see no triton that isn't there; a package that is really installed wins; no stand-in ever gives a result.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NoReturn

PACKAGES = ("triton", "sgl_kernel")
ABSENT = ("knobs",)
"""`triton.knobs` is optional to all who import it, and whoever finds it registers hooks that need the real package."""
DECORATORS = ("jit", "autotune", "heuristics", "constexpr_function", "must_use_result", "builtin")


class GpuOnlyError(RuntimeError):
    """Something that exists only on a GPU was called: SGLang took a path that this machine cannot go."""


def refuse(name: str) -> NoReturn:
    raise GpuOnlyError(f"{name} exists only in a GPU build of SGLang; this environment serves from a CPU")


class Placeholder:
    """Stands for a name of a missing package: can be looked into, subscripted, inherited from; calling it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Placeholder:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Placeholder(f"{self._name}.{attribute}")

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        refuse(self._name)

    def __getitem__(self, _: Any) -> Placeholder:
        return self

    def __or__(self, _: Any) -> Placeholder:  # annotations such as `tl.tensor | None`
        return self

    __ror__ = __or__

    def __contains__(self, _: Any) -> bool:  # torch asks whether "cpu" is in triton.backends.backends
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __repr__(self) -> str:
        return f"<{self._name}: not on this machine>"


class UnlaunchableKernel:
    """What `@triton.jit` leaves of a function: its attributes, and an error where it is launched."""

    def __init__(self, function: Any) -> None:
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")

    def __getitem__(self, _grid: Any) -> UnlaunchableKernel:
        return self

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        refuse(f"the triton kernel {self.__name__}")

    run = warmup = __call__

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(self.__dict__["fn"], attribute)


def kernel_decorator(*arguments: Any, **options: Any) -> Any:
    """`triton.jit` and its like, written with arguments or without."""

    def keep(function: Any) -> Any:
        return function if isinstance(function, UnlaunchableKernel | type) else UnlaunchableKernel(function)

    bare = len(arguments) == 1 and callable(arguments[0]) and not options
    return keep(arguments[0]) if bare else keep


def class_of(module: str, name: str) -> type:
    """A class for a capitalised name: it is raised, subclassed, compared with `isinstance` or holds its arguments."""
    if name.endswith(("Error", "Resources")):
        return type(name, (Exception,), {"__module__": module})

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        self.__dict__.update(options, args=arguments)

    return type(name, (), {"__module__": module, "__init__": init})


class StandInModule(ModuleType):
    """Every name can be imported from it, submodules too."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__file__ = __file__  # some look at where a package lies

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") or attribute in ABSENT:
            raise AttributeError(attribute)
        full_name = f"{self.__name__}.{attribute}"
        if full_name in sys.modules:
            return sys.modules[full_name]
        value: Any = Placeholder(full_name)
        if self.__name__.split(".")[0] == "triton":
            if attribute in DECORATORS:
                value = kernel_decorator
            elif attribute[0].isupper() or attribute == "constexpr":
                value = class_of(self.__name__, attribute)
        setattr(self, attribute, value)
        return value


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stand-ins. It is the last finder, so that a package that is installed is found before."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        parts = fullname.split(".")
        if parts[0] not in PACKAGES or parts[-1] in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module_names = vars(module)
        if module.__name__ == "triton":
            module_names["__version__"] = "3.0.0"
            module_names["cdiv"] = lambda a, b: -(a // -b)
            module_names["next_power_of_2"] = lambda n: 1 << max(0, n - 1).bit_length()
            module_names["triton_key"] = lambda: "quintain_sglang_cpu"  # part of the key of torch.compile's cache
        elif module.__name__ == "sgl_kernel":
            module_names["__version__"] = "0.0.0"


class TorchvisionOperators(importlib.abc.MetaPathFinder):
    """Declares, once, the operators of torchvision's compiled part, which does not load beside a CPU torch."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname != "torchvision._meta_registrations":
            return
        sys.meta_path.remove(self)
        torch = importlib.import_module("torch")  # loaded already: torchvision imports it first
        for operator in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, operator):
                torch.library.define(
                    f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    sys.meta_path.insert(0, TorchvisionOperators())
    sys.meta_path.append(StandInFinder())
