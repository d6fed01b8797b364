"""For the tests of your workflows: virtual time and crash points."""

from edda.testing.app import VirtualApp
from edda.testing.clock import VirtualClock
from edda.testing.crash import CrashMode, CrashPoint, CrashPoints, SimulatedCrash

__all__ = ["CrashMode", "CrashPoint", "CrashPoints", "SimulatedCrash", "VirtualApp", "VirtualClock"]
