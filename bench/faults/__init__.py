"""An engine that dies or hangs under load: what do clients see, and how long is it away?"""
