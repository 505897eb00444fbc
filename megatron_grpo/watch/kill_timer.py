"""A kernel timer, the last resort against a process that neither runs nor ends."""

import ctypes
import signal

CLOCK_MONOTONIC = 1
SIGEV_SIGNAL = 0


class _SigEvent(ctypes.Structure):
    """`struct sigevent` of 64-bit Linux."""

    _fields_ = (
        ("sigev_value", ctypes.c_void_p),
        ("sigev_signo", ctypes.c_int),
        ("sigev_notify", ctypes.c_int),
        ("padding", ctypes.c_byte * 48),
    )


class _TimerSpec(ctypes.Structure):
    """`struct itimerspec`: seconds and nanoseconds."""

    _fields_ = (("it_interval", ctypes.c_long * 2), ("it_value", ctypes.c_long * 2))


class KillTimer:
    """Makes Linux SIGKILL this process some seconds after the last `wind`.

    This ends processes that cannot end by themselves: one that is stopped (SIGSTOP), or one in
    which C code never releases the GIL. Children do not inherit the timer.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._libc = ctypes.CDLL(None, use_errno=True)
        event = _SigEvent(sigev_signo=signal.SIGKILL, sigev_notify=SIGEV_SIGNAL)
        self._timer = ctypes.c_void_p()
        failed = self._libc.timer_create(
            CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)
        )
        assert not failed, f"timer_create: errno {ctypes.get_errno()}"

    def wind(self) -> None:
        """Restart the timer."""
        self._set(self._seconds)

    def stop(self) -> None:
        """Disarm the timer."""
        self._set(0.0)

    def _set(self, seconds: float) -> None:
        whole = int(seconds)
        spec = _TimerSpec(it_value=(whole, int((seconds - whole) * 1e9)))
        self._libc.timer_settime(self._timer, 0, ctypes.byref(spec), None)
