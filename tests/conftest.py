"""What all tests share: properties are judged by what they find, not by how long a busy machine takes."""

from hypothesis import settings

settings.register_profile("pastcast", deadline=None)
settings.load_profile("pastcast")
