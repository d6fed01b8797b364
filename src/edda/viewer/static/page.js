import { keepTimes } from "./times.js";
import { listenToKeys } from "./keys.js";
import { offerCopies } from "./copy.js";
import { offerThemes } from "./themes.js";
import { offerChoices } from "./choices.js";
import { keepLive } from "./live.js";

offerThemes();
offerCopies();
offerChoices();
listenToKeys();
keepTimes();
keepLive();
