from trainer.models import *
