"""Runs functions compiled for AArch64 on any processor: Zig's compiler, Unicorn's emulator, memory that both sides see.

A program is loaded where it was linked for, and its entry point is a C function of one pointer. There is no operating
system beneath it: it has what it was given.
"""

import struct
import subprocess
import sys
from pathlib import Path

import unicorn
from unicorn import arm64_const as arm

_PAGE = 1 << 16
_STACK, _STACK_BYTES = 0x7000_0000, 1 << 22
_HEAP, _HEAP_BYTES = 0x1_0000_0000, 1 << 26
_RETURN = 0x6000_0000  # where the function returns to
_LOAD = 1  # the kind of a program header whose bytes are loaded


def compile_program(sources: list[tuple[Path, list[str]]], flags: list[str], folder: Path, entry: str) -> Path:
    """Compiles sources, each with flags of its own, and links them to a program whose entry point is `entry`."""
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl", "-fno-stack-protector"]
    objects = []
    for source, own in sources:
        objects.append(folder / f"{source.stem}.o")
        subprocess.run([*zig, *flags, *own, "-c", str(source), "-o", str(objects[-1])], check=True)
    program = folder / "program"
    link = ["-static", "-nostartfiles", "-no-pie", f"-Wl,-e,{entry}", "-o", str(program)]
    subprocess.run([*zig, *map(str, objects), *link], check=True)
    return program


class Machine:
    """One processor with all extensions, and a program."""

    def __init__(self, program: Path):
        self.uc = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self.uc.ctl_set_cpu_model(arm.UC_CPU_ARM64_MAX)
        self.uc.reg_write(arm.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # vector instructions do not trap
        image = program.read_bytes()
        self.entry, headers = struct.unpack_from("<QQ", image, 24)
        size, count = struct.unpack_from("<HH", image, 54)
        pages = set()
        for at in range(headers, headers + size * count, size):
            kind, _, offset, address, _, in_file, in_memory, _ = struct.unpack_from("<IIQQQQQQ", image, at)
            if kind != _LOAD:
                continue
            for page in range(address // _PAGE, (address + in_memory - 1) // _PAGE + 1):
                if page not in pages:
                    self.uc.mem_map(page * _PAGE, _PAGE)
                    pages.add(page)
            self.uc.mem_write(address, image[offset : offset + in_file])
        for address, length in ((_STACK, _STACK_BYTES), (_HEAP, _HEAP_BYTES), (_RETURN, _PAGE)):
            self.uc.mem_map(address, length)
        self.next = _HEAP

    def clear(self) -> None:
        """Forgets all arrays; memory is zeros again."""
        self.uc.mem_write(_HEAP, bytes(self.next - _HEAP))
        self.next = _HEAP

    def place(self, data: bytes | int) -> int:
        """The address of a copy of bytes, or of as many zeros."""
        length = data if isinstance(data, int) else len(data)
        address = self.next
        self.next += -(-length // 64) * 64 + 64
        if self.next > _HEAP + _HEAP_BYTES:
            raise MemoryError(f"{length} more bytes do not fit into {_HEAP_BYTES}")
        if not isinstance(data, int):
            self.uc.mem_write(address, data)
        return address

    def read(self, address: int, length: int) -> bytes:
        return bytes(self.uc.mem_read(address, length))

    def call(self, argument: int) -> None:
        self.uc.reg_write(arm.UC_ARM64_REG_SP, _STACK + _STACK_BYTES - 64)
        self.uc.reg_write(arm.UC_ARM64_REG_X0, argument)
        self.uc.reg_write(arm.UC_ARM64_REG_LR, _RETURN)
        self.uc.emu_start(self.entry, _RETURN)

    def count(self, argument: int) -> int:
        """Calls, and says how many instructions that takes."""
        counted = 0

        def block(_uc, _address, size, _data):
            nonlocal counted
            counted += size // 4

        hook = self.uc.hook_add(unicorn.UC_HOOK_BLOCK, block)
        try:
            self.call(argument)
        finally:
            self.uc.hook_del(hook)
        return counted
