from trainer.models.spec import *
