"""Triton's interpreter without the work that it repeats.

At each launch, and at each call of one Triton function by another, the interpreter goes through all names of
triton.language to put its own functions in place of the builtins: 0.6 ms, two fifths of the time of our tests of
kernels. What stands there already it leaves alone. So it is enough to look at the names that were builtins once, and to
go through them once a launch for each module. What is interpreted, and how, stays the same.
"""

import inspect

from triton.runtime import interpreter


def make_quick():
    """Put this in place, once a process; of another release of Triton that has not these parts, nothing changes."""
    parts = ("_patch_builtin", "_patch_attr", "_patch_lang", "GridExecutor", "InterpretedFunction")
    if not all(hasattr(interpreter, part) for part in parts):
        return
    is_builtin = interpreter.tl.core.is_builtin
    names = {}  # module or class -> the names of its builtins
    patched = set()  # the modules whose languages this launch has patched, by their globals
    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__

    def patch_builtin(package, builder, scope):
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    def patch_lang_once(fn):
        if id(fn.__globals__) in patched:
            return None
        patched.add(id(fn.__globals__))
        return patch_lang(fn)

    def call_device_function(self, *args, **kwargs):
        patch_lang_once(self.fn)
        fn = self.rewrite()
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    def call_grid(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_builtin = patch_builtin
    interpreter.InterpretedFunction.__call__ = call_device_function
    interpreter.GridExecutor.__call__ = call_grid
