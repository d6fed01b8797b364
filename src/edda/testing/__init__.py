"""For the tests of your workflows: virtual time and crash points."""

from edda.testing.app import VirtualApp
from edda.testing.clock import VirtualClock
from edda.testing.crash import CrashPoints, CrashMode, CrashPoint, SimulatedCrash

__all__ = ["CrashPoints", "CrashMode", "CrashPoint", "SimulatedCrash", "VirtualApp", "VirtualClock"]
