"""The tables of text normalisation: what written short forms are called."""

from __future__ import annotations

_JANUARY_TO_DECEMBER = (
    "January February March April May June July August September October November December"
)
MONTHS = tuple(_JANUARY_TO_DECEMBER.split())
MONTH_ABBREVIATIONS = {month[:3]: month for month in MONTHS if month != "May"} | {
    "Sept": "September"
}
WEEKDAYS = {
    "Mon": "Monday",
    "Tue": "Tuesday",
    "Tues": "Tuesday",
    "Wed": "Wednesday",
    "Thu": "Thursday",
    "Thur": "Thursday",
    "Thurs": "Thursday",
    "Fri": "Friday",
    "Sat": "Saturday",
    "Sun": "Sunday",
}

# Abbreviations written with a full stop: before a name, anywhere, before more of the sentence.
TITLES = {
    "Mr": "mister",
    "Mrs": "missus",
    "Ms": "miz",
    "Dr": "doctor",
    "Prof": "professor",
    "Rev": "reverend",
    "Gen": "general",
    "Sgt": "sergeant",
    "Capt": "captain",
    "Lt": "lieutenant",
    "Sen": "senator",
    "Gov": "governor",
    "Pres": "president",
    "Mt": "mount",
    "Ft": "fort",
    "St": "saint",
}
ABBREVIATIONS = {
    "Jr": "junior",
    "Sr": "senior",
    "Ave": "avenue",
    "Blvd": "boulevard",
    "Rd": "road",
    "Inc": "incorporated",
    "Ltd": "limited",
    "Corp": "corporation",
    "Co": "company",
    "Dept": "department",
    "Univ": "university",
    "approx": "approximately",
    "Approx": "approximately",
    "vs": "versus",
    "etc": "et cetera",
    "St": "street",
    "Dr": "drive",
}
MID_SENTENCE_ABBREVIATIONS = {
    "est": "estimated",
    "esp": "especially",
    "incl": "including",
    "min": "minimum",
    "max": "maximum",
    "ext": "extension",
    "tel": "telephone",
    "vol": "volume",
    "fig": "figure",
    "Fig": "figure",
    "Vol": "volume",
    "p": "page",
    "pp": "pages",
    "ca": "circa",
}
PHRASES = {
    "e.g": "for example",
    "i.e": "that is",
    "a.k.a": "also known as",
    "Ph.D": "pee aitch dee",
    "Wi-Fi": "wifi",
    "wi-fi": "wifi",
    "E-mail": "email",
    "e-mail": "email",
}

# Units behind a number: (one, many).
UNITS = {
    "km": ("kilometer", "kilometers"),
    "m": ("meter", "meters"),
    "cm": ("centimeter", "centimeters"),
    "mm": ("millimeter", "millimeters"),
    "nm": ("nanometer", "nanometers"),
    "mi": ("mile", "miles"),
    "ft": ("foot", "feet"),
    "in": ("inch", "inches"),
    "yd": ("yard", "yards"),
    "kg": ("kilogram", "kilograms"),
    "g": ("gram", "grams"),
    "mg": ("milligram", "milligrams"),
    "lb": ("pound", "pounds"),
    "lbs": ("pound", "pounds"),
    "oz": ("ounce", "ounces"),
    "l": ("liter", "liters"),
    "L": ("liter", "liters"),
    "ml": ("milliliter", "milliliters"),
    "mL": ("milliliter", "milliliters"),
    "h": ("hour", "hours"),
    "hr": ("hour", "hours"),
    "hrs": ("hour", "hours"),
    "min": ("minute", "minutes"),
    "mins": ("minute", "minutes"),
    "s": ("second", "seconds"),
    "sec": ("second", "seconds"),
    "secs": ("second", "seconds"),
    "ms": ("millisecond", "milliseconds"),
    "Hz": ("hertz", "hertz"),
    "kHz": ("kilohertz", "kilohertz"),
    "MHz": ("megahertz", "megahertz"),
    "GHz": ("gigahertz", "gigahertz"),
    "W": ("watt", "watts"),
    "kW": ("kilowatt", "kilowatts"),
    "MW": ("megawatt", "megawatts"),
    "kWh": ("kilowatt hour", "kilowatt hours"),
    "V": ("volt", "volts"),
    "mA": ("milliamp", "milliamps"),
    "KB": ("kilobyte", "kilobytes"),
    "kB": ("kilobyte", "kilobytes"),
    "MB": ("megabyte", "megabytes"),
    "GB": ("gigabyte", "gigabytes"),
    "TB": ("terabyte", "terabytes"),
    "KiB": ("kibibyte", "kibibytes"),
    "MiB": ("mebibyte", "mebibytes"),
    "GiB": ("gibibyte", "gibibytes"),
    "Mbps": ("megabit per second", "megabits per second"),
    "Gbps": ("gigabit per second", "gigabits per second"),
    "mph": ("mile per hour", "miles per hour"),
    "kph": ("kilometer per hour", "kilometers per hour"),
    "km/h": ("kilometer per hour", "kilometers per hour"),
    "m/s": ("meter per second", "meters per second"),
    "ft/s": ("foot per second", "feet per second"),
    "dB": ("decibel", "decibels"),
    "px": ("pixel", "pixels"),
    "cal": ("calorie", "calories"),
    "kcal": ("kilocalorie", "kilocalories"),
    "°C": ("degree Celsius", "degrees Celsius"),
    "°F": ("degree Fahrenheit", "degrees Fahrenheit"),
    "°K": ("kelvin", "kelvin"),
    "°": ("degree", "degrees"),
    "%": ("percent", "percent"),
    "‰": ("per mille", "per mille"),
    "m^2": ("square meter", "square meters"),
    "km^2": ("square kilometer", "square kilometers"),
    "m^3": ("cubic meter", "cubic meters"),
}

# Currency before or behind an amount: (one, many, one hundredth, hundredths).
CURRENCIES = {
    "$": ("dollar", "dollars", "cent", "cents"),
    "€": ("euro", "euros", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"),
    "¥": ("yen", "yen", "sen", "sen"),
    "₹": ("rupee", "rupees", "paisa", "paise"),
}
MAGNITUDES = {
    "k": "thousand",
    "K": "thousand",
    "m": "million",
    "M": "million",
    "mn": "million",
    "bn": "billion",
    "B": "billion",
    "b": "billion",
    "tn": "trillion",
    "T": "trillion",
}

SYMBOLS = {
    "&": "and",
    "@": "at",
    "+": "plus",
    "=": "equals",
    "≈": "is about",
    "≠": "is not equal to",
    "≤": "is at most",
    "≥": "is at least",
    "×": "times",
    "÷": "divided by",
    "±": "plus or minus",
    "−": "minus",
    "√": "square root of",
    "π": "pi",
    "∞": "infinity",
    "°": "degrees",
    "%": "percent",
    "€": "euros",
    "£": "pounds",
    "$": "dollars",
    "¥": "yen",
    "§": "section",
    "→": "to",
    "µ": "micro",
    "μ": "micro",
    "Ω": "ohms",
}

VULGAR_FRACTIONS = {
    "½": "1/2",
    "⅓": "1/3",
    "⅔": "2/3",
    "¼": "1/4",
    "¾": "3/4",
    "⅕": "1/5",
    "⅖": "2/5",
    "⅗": "3/5",
    "⅘": "4/5",
    "⅙": "1/6",
    "⅛": "1/8",
    "⅜": "3/8",
    "⅝": "5/8",
    "⅞": "7/8",
}
FRACTION_PARTS = {2: ("half", "halves"), 4: ("quarter", "quarters")}

ROMAN_NUMERALS = {
    "II": 2,
    "III": 3,
    "IV": 4,
    "V": 5,
    "VI": 6,
    "VII": 7,
    "VIII": 8,
    "IX": 9,
    "X": 10,
    "XI": 11,
    "XII": 12,
    "XIII": 13,
    "XIV": 14,
    "XV": 15,
    "XVI": 16,
}
COUNTED_IN_ROMAN = "Act Appendix Article Book Chapter Part Phase Section Stage Type Volume War"
RULERS = (
    "Benedict Catherine Charles Edward Elizabeth Francis Frederick George Gregory Henry James John "
    "Louis Mary Napoleon Nicholas Paul Philip Pius Ramesses Richard Robert William"
)

_TWO_LETTERS = "AH AM AN AS AT BE BY DO GO HA HE HI IF IN IS ME MY NO OF OH ON OR SO TO UP WE"
SHORT_WORDS_IN_CAPITALS = frozenset(_TWO_LETTERS.split())
"""Two-letter words that are words in capitals too; other pairs of capitals are spelled out."""

SPOKEN_IN_CAPITALS = {"ASAP": "ay sap", "SQL": "sequel", "JPEG": "jay peg", "GIF": "gif"}
