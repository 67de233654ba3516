"""``unshare … python contained.py UID STORE TMP command``: as in a container, with what Linux lets anybody do.

The command becomes the first process of its namespace: without a right of root's, without a network but loopback, on a
file system to read only. It can write to the folder STORE, and to TMP, which is emptied as a tmpfs is.
"""

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys

MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1  # of linux/mount.h, on all processors
SIOCSIFFLAGS, UP = 0x8914, 1


def set_read_only(path: str, read_only: bool) -> None:
    """A mount and all below it, or one that may be written again."""
    flags = struct.pack("4Q", READ_ONLY if read_only else 0, 0 if read_only else READ_ONLY, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE, flags, len(flags)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)


def main(uid: str, store: str, temporary: str, *command: str) -> None:
    """Shut this process in, and become the command."""
    subprocess.run(["mount", "--bind", store, store], check=True)
    set_read_only("/", True)
    for place in (store, "/proc"):  # where the last command here says who it is
        set_read_only(place, False)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777,noexec,nosuid,nodev", "tmpfs", temporary], check=True)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", UP))
    os.execvp("unshare", ["unshare", "--user", f"--map-user={uid}", f"--map-group={uid}", *command])


if __name__ == "__main__":
    main(*sys.argv[1:])
