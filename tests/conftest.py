import signal

from hypothesis import settings

# A runner in the background may have us ignore Ctrl-C, and so would every program that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is, and no test asks for that.
settings.register_profile("orchard", deadline=None)
settings.load_profile("orchard")
